"""Runs a published table: every run its cells need is planned, and what is not finished is run."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from fedskew.core.settings import UsageError
from fedskew.data.dataset import DataSet
from fedskew.data.sources.loading import load
from fedskew.experiment.config import Experiment
from fedskew.experiment.run import Run
from fedskew.experiment.run_directory import is_finished
from fedskew.federation.protocol import Record
from fedskew.studies.choice import choose_rate
from fedskew.studies.execution import Outcome, execute, file_name
from fedskew.studies.tables.recipe import Recipe, Scale


@dataclass(frozen=True)
class Work:
    """One run of a table. A cell is the mean of several runs if it covers several settings or seeds."""

    row: str
    column: str
    seed: int
    variant: int  # which of the settings in the row's `mean_over`
    experiment: Experiment
    path: Path  # ends in a hash of the settings, so a changed recipe does not use old results

    @property
    def finished(self) -> bool:
        """Whether the run's directory holds its final figures."""
        return is_finished(self.path)

    @property
    def data(self) -> str:
        """The name or path of the run's data set."""
        return str(self.experiment.data)


def plan(
    recipe: Recipe, scale: Scale, rows: Sequence[str], columns: Sequence[str], seeds: Sequence[int], out: Path
) -> list[Work]:
    """Every run that the chosen cells need, row by row. The same experiment in two columns shares one directory.

    Args:
        recipe: the table.
        scale: "paper" (as published) or "reduced".
        rows: names of rows; empty means all rows of this scale.
        columns: names of columns; empty means all columns of this scale.
        seeds: empty means the recipe's.
        out: folder of the runs.
    """
    works = []
    for row in recipe.chosen(scale, "rows", rows):
        for seed in seeds or recipe.chosen_seeds(scale):
            for column in recipe.chosen(scale, "columns", columns):
                for variant, experiment in enumerate(recipe.experiments(row, column, seed, scale)):
                    mark = hashlib.sha256(experiment.to_toml().encode()).hexdigest()[:10]
                    path = out / file_name(row) / f"{experiment.method_name}-s{seed}-{mark}"
                    works.append(Work(row, column, seed, variant, experiment, path))
    return works


def choose_rates(
    recipe: Recipe, scale: Scale, rows: Sequence[str], columns: Sequence[str], out: Path, **options: Any
) -> Recipe:
    """The recipe with the learning rates of its controls chosen on validation data, row by row (see `choose_rate`).

    A row that is a mean over several settings chooses on the first of them. Rows without their data are left out.
    """
    chosen = dict(recipe.chosen_rates)
    for row in recipe.chosen(scale, "rows", rows):
        for column in recipe.chosen(scale, "columns", columns):
            rates = recipe.parsed_columns[column].rates
            if not rates:
                continue
            experiment = recipe.experiments(row, column, 0, scale)[0]
            try:
                data = _data(str(experiment.data), options.get("data_dir"))
            except UsageError:
                continue
            mark = hashlib.sha256(experiment.to_toml().encode()).hexdigest()[:10]
            path = out / file_name(row) / f"rate-{mark}"
            chosen[row, column] = choose_rate(replace(experiment, data=data), rates, path, **options)
    return replace(recipe, chosen_rates=chosen)


@lru_cache(maxsize=2)
def _data(name: str, folder: Path | None) -> DataSet:
    """A data set under the name the recipe gives it, which is what a run's settings.toml records."""
    return dataclasses.replace(load(name, folder), name=name)


def missing_data(works: Sequence[Work], data_dir: Path | None) -> dict[str, str]:
    """Data sets that runs need but that are not available, each with the sentence that says how to get it."""
    missing = {}
    for name in dict.fromkeys(work.data for work in works if not work.finished):
        try:
            _data(name, data_dir)
        except UsageError as error:
            missing[name] = str(error)
    return missing


Watch = Callable[[Work, Run, Record], None]  # called after each round


def run_table(
    works: Sequence[Work], watch: Watch, *, data_dir: Path | None = None, **options: Any
) -> Iterator[tuple[Work, Outcome]]:
    """Each piece of work with its outcome. Finished runs are read, interrupted ones resumed (see `execute`).

    A data set that is not available is noted in the outcome of its runs; the others are run.
    """
    missing = missing_data(works, data_dir)
    for work in works:
        if work.finished:
            yield work, execute(work.experiment, work.path)
        elif work.data in missing:
            yield work, Outcome(None, [], failed=f"the data set {work.data} is not available", no_data=True)
        else:
            experiment = replace(work.experiment, data=_data(work.data, data_dir))
            yield work, execute(experiment, work.path, partial(watch, work), **options)
