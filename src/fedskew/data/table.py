"""Tables with gaps and categories, and how they become the inputs of a net.

A column is of numbers or of categories. A net gets each number minus its mean, divided by its standard deviation; one
input per category, scaled in the same way; and an indicator for each column that is often missing. A missing value is
filled by the column's mean, for categories by the mean of each of their inputs, so it becomes 0. All figures come from
sums over the clients' training samples (`ColumnSums`): no row leaves a client, and test samples have no influence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from fedskew.core.settings import UsageError
from fedskew.data.dataset import Array, Column, DataSet, number_of

OFTEN = 0.2  # share of missing values from which a column gets an indicator
LARGEST = 1e100  # squares of larger numbers are not finite
AT_ONCE = 1 << 20  # inputs that are computed at a time, so that columns of many categories need little memory


class ColumnSums(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one client says about one column of its training samples."""

    name: str
    rows: int  # training samples
    present: int  # those that have a value
    total: float = 0.0  # sum of the numbers
    squares: float = 0.0  # sum of squared distances to this client's own mean
    counts: dict[str, int] = {}  # samples by category; {}: a column of numbers

    def problem(self) -> str:
        """Why these sums cannot be true; "" if they can."""
        if not 0 <= self.present <= self.rows:
            return "counts more values than samples"
        if not (math.isfinite(self.total) and 0 <= self.squares < math.inf):
            return "has sums that are not finite numbers"
        if abs(self.total) > self.present * LARGEST or self.squares > self.present * (2 * LARGEST) ** 2:
            return f"has sums of numbers above {LARGEST:g}"
        if self.counts and (min(self.counts.values()) < 1 or sum(self.counts.values()) != self.present):
            return "has counts of categories that do not add up"
        return ""


def sums_of(x: Array, columns: Sequence[Column]) -> tuple[ColumnSums, ...]:
    """The sums of training samples x, values as `DataSet` holds them.  # [samples, columns]"""
    return tuple(_sums(x[:, j], column) for j, column in enumerate(columns))


def _sums(values: Array, column: Column) -> ColumnSums:
    known = values[~np.isnan(values)]
    if column.categories:
        counts = np.bincount(known.astype(np.int64), minlength=len(column.categories))
        by_name = {name: int(n) for name, n in zip(column.categories, counts, strict=True) if n}
        return ColumnSums(column.name, len(values), len(known), counts=by_name)
    total = math.fsum(known)
    squares = math.fsum((known - total / max(len(known), 1)) ** 2)
    return ColumnSums(column.name, len(values), len(known), total, squares)


class PreparedColumn(msgspec.Struct, frozen=True):
    """How one column becomes inputs: each is (value - mean) * scale; a constant has scale 0.

    A column of numbers has one mean and one scale, one of categories has them for each category.
    """

    name: str
    categories: tuple[str, ...]  # (): numbers
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    indicator: tuple[float, float] | None = None  # mean and scale of the input "is missing"; None: it has none

    @property
    def values(self) -> tuple[float, ...]:
        """What stands for each category in a matrix: its number if all categories are numbers, else its position."""
        numbers = [number_of(name) for name in self.categories]
        positions = range(len(self.categories))
        return tuple(float(p) if None in numbers or n is None else n for p, n in zip(positions, numbers, strict=True))


class Preparation(msgspec.Struct, frozen=True):
    """How a table becomes the inputs of a net, the same for all clients.

    columns: those that are used, in order.
    left_out: columns without any value in the training samples.
    """

    columns: tuple[PreparedColumn, ...]
    left_out: tuple[str, ...] = ()

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the inputs: "age", "thal=3", "thal missing"."""
        names: list[str] = []
        for c in self.columns:
            names += [f"{c.name}={category}" for category in c.categories] or [c.name]
            names += [f"{c.name} missing"] if c.indicator else []
        return tuple(names)

    def matrix(self, x: Array, columns: Sequence[Column]) -> Array:
        """Samples as `TableInput` takes them, from values as `DataSet` holds them. Unknown categories become missing.

        UsageError if a column is not there.
        """
        return recoded(x, columns, self.columns, [c.values for c in self.columns])

    def apply(self, x: Array, columns: Sequence[Column]) -> Array:
        """The inputs of a net, float32 [samples, features], from values as `DataSet` holds them."""
        module, matrix = TableInput(self), torch.from_numpy(self.matrix(x, columns))
        inputs = torch.empty(len(matrix), len(self.features))
        rows = max(1, AT_ONCE // len(self.features))
        for start in range(0, len(matrix), rows):
            inputs[start : start + rows] = module(matrix[start : start + rows])
        made: Array = inputs.numpy()
        return made

    def describe(self, missing: Mapping[str, int]) -> str:
        """One line about what is filled; "" if nothing is. `missing`: how many values each column lacks."""
        gaps = {name: count for name, count in missing.items() if count and name not in self.left_out}
        parts = []
        if gaps:
            values, columns = sum(gaps.values()), "1 column" if len(gaps) == 1 else f"{len(gaps)} columns"
            parts.append(f"filled {values:,} missing values in {columns} by column means")
        if marked := [c.name for c in self.columns if c.indicator]:
            parts.append(f"indicator columns for {', '.join(marked)}")
        if self.left_out:
            parts.append(f"left out {', '.join(self.left_out)}, which no training sample has")
        return "; ".join(parts)


def recoded(
    x: Array, columns: Sequence[Column], wanted: Sequence[Column | PreparedColumn], codes: Sequence[Sequence[float]]
) -> Array:
    """Values of a table in the order and with the categories of another; an unknown category becomes missing.

    codes: what stands for each category of the wanted columns. UsageError if a column is not there.
    """
    place = {column.name: j for j, column in enumerate(columns)}
    if absent := [column.name for column in wanted if column.name not in place]:
        raise UsageError(f"there is no column '{absent[0]}': expected {', '.join(c.name for c in wanted)}.")
    pairs = [(place[column.name], column, code) for column, code in zip(wanted, codes, strict=True)]
    return np.stack([_recoded(x[:, j], columns[j], column.categories, code) for j, column, code in pairs], axis=1)


def _recoded(values: Array, column: Column, categories: Sequence[str], codes: Sequence[float]) -> Array:
    if not column.categories and not categories:
        return values
    names = column.categories
    words = ["" if math.isnan(v) else names[int(v)] if names else canonical(float(v)) for v in values]
    if categories:
        code = dict(zip(categories, codes, strict=True))
        return np.array([code.get(word, math.nan) for word in words])
    numbers = [number_of(word) if word else math.nan for word in words]
    if None in numbers:
        raise UsageError(
            f"column '{column.name}' has '{words[numbers.index(None)]}': expected numbers, as in the other tables."
        )
    return np.array(numbers, np.float64)


def canonical(value: float | str) -> str:
    """The name of a category: "3", "3.0" and 3.0 are the same one, as programs write whole numbers in both ways."""
    number = number_of(value) if isinstance(value, str) else value
    if number is None:
        return str(value)
    return str(int(number)) if number == int(number) else repr(number)


def ordered(names: Sequence[str]) -> tuple[str, ...]:
    """Categories in order: by value if all are numbers, else by name."""
    numbers = {name: number_of(name) for name in names}
    if None in numbers.values():
        return tuple(sorted(names))
    return tuple(sorted(names, key=lambda name: numbers[name] or 0.0))


def agree_on(clients: Mapping[str, Sequence[ColumnSums]]) -> Preparation:
    """The preparation that follows from the sums of all clients (name of a client -> its sums).

    Columns are matched by name. UsageError names a client whose columns do not fit the others'.
    """
    first = next(iter(clients))
    names = [sums.name for sums in clients[first]]
    for client, sums in clients.items():
        by_name = {one.name for one in sums}
        if odd := [*(name for name in names if name not in by_name), *(by_name - set(names))]:
            raise UsageError(f"{client} and {first} have different columns: '{odd[0]}' is in one of them only.")
        if bad := [one for one in sums if one.problem()]:
            raise UsageError(f"{client}: column '{bad[0].name}' {bad[0].problem()}.")
    tables = {client: {one.name: one for one in sums} for client, sums in clients.items()}
    made = {name: _prepared(name, {client: table[name] for client, table in tables.items()}) for name in names}
    used = tuple(column for column in made.values() if column is not None)
    if not used:
        raise UsageError("the training samples have no value in any column: expected at least one.")
    return Preparation(used, tuple(name for name, column in made.items() if column is None))


def _prepared(name: str, sums: Mapping[str, ColumnSums]) -> PreparedColumn | None:
    rows, present = (sum(getattr(one, key) for one in sums.values()) for key in ("rows", "present"))
    if not present:
        return None
    known = {client: one for client, one in sums.items() if one.present}
    words = [client for client, one in known.items() if one.counts]
    if words and len(words) < len(known):
        other = next(client for client in known if client not in words)
        raise UsageError(
            f"column '{name}' has categories at {words[0]} and numbers at {other}: expected one kind; "
            f"give ?categorical={name} everywhere."
        )
    missing = 1 - present / rows
    indicator = (missing, _scale(missing * (1 - missing), missing)) if missing >= OFTEN else None
    if words:
        categories = ordered(sorted({category for one in known.values() for category in one.counts}))
        shares = [sum(one.counts.get(category, 0) for one in known.values()) / present for category in categories]
        scales = tuple(_scale(share * (1 - share), share) for share in shares)
        return PreparedColumn(name, categories, tuple(shares), scales, indicator)
    mean = math.fsum(one.total for one in known.values()) / present
    # squared distances to the common mean, without sums of squares, which lose the digits of large numbers
    spread = math.fsum(one.squares + one.present * (one.total / one.present - mean) ** 2 for one in known.values())
    return PreparedColumn(name, (), (mean,), (_scale(spread / present, mean),), indicator)


def _scale(variance: float, mean: float) -> float:
    """1 / standard deviation; 0 if it is no more than the rounding of the mean."""
    std = math.sqrt(variance)
    return 1 / std if std > 4 * math.ulp(abs(mean)) and math.isfinite(std) else 0.0


def prepared(data: DataSet, preparation: Preparation) -> DataSet:
    """A table with the inputs of a net, float32 [samples, features], in place of the values that were read."""
    x_train, x_test = (preparation.apply(x, data.columns) for x in (data.x_train, data.x_test))
    return replace(data, x_train=x_train, x_test=x_test, columns=())


class TableInput(nn.Module):
    """Turns rows of a table into the inputs of a net.

    Takes float64 [samples, columns] in the order of `preparation.columns`: numbers; for categories
    `PreparedColumn.values`, anything else being missing; NaN for a missing value. Gives float32 [samples, features].
    """

    def __init__(self, preparation: Preparation) -> None:
        super().__init__()
        source, value, mean, scale = [], [], [], []
        for j, c in enumerate(preparation.columns):
            indicator = [c.indicator] if c.indicator else []
            count = len(c.mean) + len(indicator)
            source += [j] * count
            # NaN marks a number, infinity an indicator: no category has these values
            value += [*(c.values or (math.nan,)), *[math.inf] * len(indicator)]
            mean += [*c.mean, *(pair[0] for pair in indicator)]
            scale += [*c.scale, *(pair[1] for pair in indicator)]
        value_ = torch.tensor(value, dtype=torch.float64)
        place = torch.tensor(source)
        self.register_buffer("source", place)
        self.register_buffer("value", value_)
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float64))
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.float64))
        self.register_buffer("number", value_.isnan())
        self.register_buffer("indicator", value_.isinf())
        # the first and last input of each input's column, to see whether one of its categories is there
        self.register_buffer("first", torch.searchsorted(place, place))
        self.register_buffer("last", torch.searchsorted(place, place, right=True) - 1)
        self.source: Tensor
        self.value: Tensor
        self.mean: Tensor
        self.scale: Tensor
        self.number: Tensor
        self.indicator: Tensor
        self.first: Tensor
        self.last: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.float64)[:, self.source]
        missing_number = x.isnan()
        matches = (x == self.value) | (self.number & ~missing_number)
        found = matches.to(torch.int64).cumsum(1)
        present = matches[:, self.first] | (found[:, self.last] > found[:, self.first])
        numbers = torch.where(missing_number, torch.zeros_like(x), x)
        value = torch.where(self.number, numbers, matches.to(torch.float64))
        value = torch.where(self.indicator, (~present).to(torch.float64), value)
        scaled = (value - self.mean) * self.scale
        return torch.where(present | self.indicator, scaled, torch.zeros_like(scaled)).to(torch.float32)
