"""Recipes of published tables: one TOML file per table, in `recipes/` beside this module (also `experiments/tables`).

title, source, notes    what the table is; how we read the paper where it is silent
figure                  what is tabulated: a key of `fedskew.evaluation.figures`
tolerance               how far from the paper still counts as reproduced, in the figure's unit
seeds
baseline, proposed      the columns whose difference is the paper's claim
[columns]               name = "method:field=value,...", or {method = "...", figure = "..."}
[controls]              further columns that the paper does not have, written like [columns]: what a claim is checked
                        against, such as the method with its terms off. They may also have
    settings            settings that differ from the table's
    rates               learning rates; the best one on validation data is used, for each row (see studies/choice.py)
[settings]              the paper's experiment, as in `fedskew run --config`
[rows.NAME]             settings that differ in this row, and
    paper               the published values, in the order of the columns; nan where it has none
    options             settings of methods in this row, by column; "*" is every method that has them
    mean_over           settings of several experiments; the row is their mean
[reduced]               the scale for two CPU cores: `what` was reduced, in words; minutes; optionally
                        rows, columns, seeds; cut (put before every split), clients (of every split);
                        settings, options as above
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from fedskew.core.settings import UsageError, build, choose, parse, unknown
from fedskew.core.training import Count, Positive
from fedskew.evaluation.figures import ACCURACIES, COMPUTED, DIAGNOSTICS, MEASURED, Better
from fedskew.experiment.config import Experiment, from_dict, method_of, read_toml
from fedskew.methods._find import find_method

HOME = Path(__file__).parent / "recipes"
NOT_SETTINGS = ("paper", "options", "mean_over")  # what a row has beside settings
Scale = Literal["paper", "reduced"]
SCALES: tuple[Scale, ...] = get_args(Scale)
Tree = dict[str, Any]
TABULATED = ACCURACIES | MEASURED | COMPUTED | DIAGNOSTICS  # the figures a table can have


@dataclass(frozen=True)
class Column:
    """A method of the table, and the figure shown of it."""

    method: str  # with its settings: fedprox:mu=0.1
    figure: str = ""  # "" for the table's
    settings: Tree = field(default_factory=dict)  # of the experiment; controls only
    rates: tuple[Positive, ...] = ()  # learning rates to choose from on validation data; controls only


@dataclass(frozen=True)
class Reduced:
    """The reduced scale: how it differs from the paper's."""

    what: str  # what was reduced, in words
    minutes: Positive  # about how long the whole table takes on two cores
    rows: tuple[str, ...] = ()  # empty means all
    columns: tuple[str, ...] = ()  # empty means all
    seeds: tuple[int, ...] = ()  # empty means the recipe's
    cut: str = ""  # a cut put before every split, such as sample:keep=600
    clients: Count | None = None  # replaces the number of clients in every split; None keeps it
    settings: Tree = field(default_factory=dict)
    options: dict[str, Tree] = field(default_factory=dict)

    def split(self, text: str) -> str:
        """A row's split at the reduced scale."""
        if self.clients:
            text, found = re.subn(r"\bclients=\d+", f"clients={self.clients}", text)
            if not found:
                raise UsageError(
                    f"[reduced] has clients={self.clients}, but the split '{text}' names none: add clients=..."
                )
        return f"{self.cut}+{text}" if self.cut else text


@dataclass(frozen=True)
class Row:
    """What a row has beside the settings of its experiments."""

    paper: tuple[float, ...]  # by column; nan where the paper has no value
    options: dict[str, Tree] = field(default_factory=dict)
    mean_over: tuple[Tree, ...] = ({},)


@dataclass(frozen=True)
class Recipe:
    """A published table, as read from its TOML file (the module's docstring has the format)."""

    title: str
    source: str
    columns: dict[str, str | Tree]
    rows: dict[str, Tree]
    reduced: Reduced = field(default_factory=lambda: Reduced("nothing", 1.0))
    controls: dict[str, str | Tree] = field(default_factory=dict)
    settings: Tree = field(default_factory=dict)
    figure: str = "global"
    tolerance: Positive = 2.0
    seeds: tuple[int, ...] = (0, 1, 2)
    baseline: str = "FedAvg"
    proposed: str = ""  # the column whose gain over the baseline is the paper's claim
    notes: str = ""
    name: str = ""
    chosen_rates: dict[tuple[str, str], float] = field(default_factory=dict)  # by row and column, once chosen

    @property
    def better(self) -> Better:
        """Whether a higher or a lower value of the table's figure is better."""
        return TABULATED[self.figure].better

    @cached_property
    def parsed_columns(self) -> dict[str, Column]:
        """The columns, then the controls, checked, by name."""
        return {
            name: Column(c) if isinstance(c, str) else build(Column, c, f"column '{name}' of table {self.name}")
            for name, c in (self.columns | self.controls).items()
        }

    @cached_property
    def parsed_rows(self) -> dict[str, Row]:
        """The rows, checked, by name."""
        return {name: self._row(name, values) for name, values in self.rows.items()}

    def _row(self, name: str, values: Tree) -> Row:
        own = {key: value for key, value in values.items() if key in NOT_SETTINGS}
        row = build(Row, own, f"row '{name}' of table {self.name}")
        if len(row.paper) != len(self.columns):
            raise UsageError(
                f"row '{name}' of table {self.name} has {len(row.paper)} values in paper; give one for each of the "
                f"{len(self.columns)} columns, nan where the paper has none."
            )
        return row

    def figure_of(self, column: str) -> str:
        """The key of the figure that a column shows."""
        return self.parsed_columns[column].figure or self.figure

    def is_published(self, column: str) -> bool:
        """Whether a column is a method as its paper has it, not with a preset of ours."""
        return getattr(method_of(self.parsed_columns[column].method), "preset", "paper") == "paper"

    def paper(self, row: str, column: str) -> float | None:
        """The published value of a cell; None if the paper has none."""
        if column in self.controls:
            return None
        value = self.parsed_rows[row].paper[list(self.columns).index(column)]
        return None if math.isnan(value) else value

    def chosen(self, scale: Scale, what: Literal["rows", "columns"], wanted: Sequence[str]) -> list[str]:
        """The names of the rows or columns to run: those in `wanted`, or all of this scale if it is empty."""
        every = list(self.rows if what == "rows" else self.parsed_columns)
        for name in wanted:
            if name not in every:
                raise unknown(f"{what[:-1]} of table {self.name}", name, every)
        scaled = list(getattr(self.reduced, what)) if scale == "reduced" else []
        if what == "columns" and scaled:
            scaled += self.controls
        return [name for name in every if name in (wanted or scaled or every)]

    def _own_settings(self, row: str, column: str) -> Tree:
        """The settings of a control that differ from the table's, with the learning rate chosen for this row."""
        rate = self.chosen_rates.get((row, column))
        own = copy.deepcopy(self.parsed_columns[column].settings)
        if rate is not None:
            merge(own, {"training": {"lr": rate}})
        return own

    def chosen_seeds(self, scale: Scale) -> tuple[int, ...]:
        """The seeds of this scale."""
        return (self.reduced.seeds if scale == "reduced" else ()) or self.seeds

    def experiments(self, row: str, column: str, seed: int, scale: Scale) -> list[Experiment]:
        """The experiments of a cell with one seed. The cell is their mean; usually there is one."""
        place = self.parsed_rows[row]
        own = {key: value for key, value in self.rows[row].items() if key not in NOT_SETTINGS}
        less = self.reduced if scale == "reduced" else None
        layers = [place.options] + ([less.options] if less else [])
        method = method_of(with_options(self.parsed_columns[column].method, column, layers))
        made = []
        for variant in place.mean_over:
            values: Tree = {}
            for layer in (self.settings, own, variant, less.settings if less else {}, self._own_settings(row, column)):
                merge(values, layer)
            if less:
                values["split"] = less.split(values.get("split", Experiment.split))
            values["seed"] = seed
            if self.figure_of(column) in DIAGNOSTICS:
                merge(values, {"evaluation": {"diagnose": True}})
            made.append(replace(from_dict(values), method=method))
        return made


def with_options(text: str, column: str, layers: Sequence[Mapping[str, Tree]]) -> str:
    """A method's text with the options that rows and scales add: first those for every method ("*"), then the column's.

    Options under "*" apply only to methods that have such a field.
    """
    name, options = parse(text, "method")[0]
    fields = {f.name for f in dataclasses.fields(find_method(name))}
    for layer in layers:
        general = {key: value for key, value in layer.get("*", {}).items() if key in fields}
        options |= {key: _written(value) for key, value in (general | layer.get(column, {})).items()}
    return name + (":" + ",".join(f"{key}={value}" for key, value in options.items()) if options else "")


def _written(value: Any) -> str:
    """A value as in a method's text, where a list is written 1-2-3."""
    return "-".join(map(str, value)) if isinstance(value, list) else str(value)


def merge(values: Tree, more: Mapping[str, Any]) -> None:
    """Override `values` by `more`, in place; tables are merged key by key."""
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(values.get(key), dict):
            merge(values[key], value)
        else:
            values[key] = copy.deepcopy(value)


def names() -> list[str]:
    """The names of the recipes that come with the package."""
    return sorted(path.stem for path in HOME.glob("*.toml"))


def load_recipe(name: str) -> Recipe:
    """A recipe by its name, or your own by the path of a .toml file.

    The experiments of all cells are built at both scales, so that a mistake shows before the first run.
    """
    path = Path(name) if name.endswith(".toml") else HOME / f"{name}.toml"
    if not name.endswith(".toml") and name not in names():
        raise unknown("table", name, names())
    values = read_toml(path)
    reduced = build(Reduced, values.pop("reduced", {}), f"[reduced] of table {path.stem}")
    recipe = replace(build(Recipe, values, f"table {path.stem}"), name=path.stem, reduced=reduced)
    _check(recipe)
    return recipe


def _check(recipe: Recipe) -> None:
    """Raise `UsageError` for a mistake that would otherwise show in the middle of a table."""
    if not recipe.columns or not recipe.rows:
        raise UsageError(f"table {recipe.name} needs [columns] and [rows] with at least one entry each.")
    for key in (recipe.figure, *(c.figure for c in recipe.parsed_columns.values() if c.figure)):
        choose(f"figure of table {recipe.name}", key, TABULATED)
    if twice := recipe.columns.keys() & recipe.controls.keys():
        raise UsageError(f"table {recipe.name} has '{min(twice)}' both in [columns] and in [controls].")
    for name in recipe.columns:
        if recipe.parsed_columns[name].settings or recipe.parsed_columns[name].rates:
            raise UsageError(f"column '{name}' of table {recipe.name} has settings or rates: only a control may.")
    for kind in ("baseline", "proposed"):
        if (given := getattr(recipe, kind)) and given not in recipe.columns:
            raise unknown(f"{kind} of table {recipe.name}", given, recipe.columns)
    less = recipe.reduced
    recipe.chosen("reduced", "rows", less.rows)
    recipe.chosen("reduced", "columns", less.columns)
    layers = [less.options, *(row.options for row in recipe.parsed_rows.values())]
    for column in (c for layer in layers for c in layer if c != "*"):
        if column not in recipe.parsed_columns:
            raise unknown(f"column (in options) of table {recipe.name}", column, recipe.parsed_columns)
    for scale in ("paper", "reduced"):
        for row in recipe.rows:
            for column in recipe.parsed_columns:
                try:
                    recipe.experiments(row, column, recipe.seeds[0], scale)
                except UsageError as error:
                    where = f"table {recipe.name}, row '{row}', column '{column}', {scale} scale"
                    raise UsageError(f"{where}: {error}") from None
