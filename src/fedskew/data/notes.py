"""What a user should know about data before a run, in one line each."""

from __future__ import annotations

import numpy as np

from fedskew.data.dataset import Array, DataSet

LARGE = 50  # a table's numbers are scaled, those of an .npz are not: normalised ones are never so large
MANY = 20  # rows from which on numbers that are all different, or follow each other, say something


def missing_values(data: DataSet) -> dict[str, int]:
    """How many values each column of a table lacks, in both parts."""
    gaps = np.isnan(data.x_train).sum(axis=0) + np.isnan(data.x_test).sum(axis=0)
    return {column.name: int(n) for column, n in zip(data.columns, gaps, strict=True)}


def id_columns(data: DataSet) -> list[str]:
    """One line about columns that number the rows, and one about whole numbers that all differ, such as an id.

    A net can only memorise them.
    """
    both = np.concatenate([data.x_train, data.x_test])
    numbers = {c.name: np.sort(values) for c, values in zip(data.columns, both.T, strict=True) if not c.categories}
    counting = [name for name, values in numbers.items() if _follow_each_other(values)]
    unique = [name for name, values in numbers.items() if name not in counting and _all_differ(values)]
    found = []
    if counting:
        verb = "numbers" if len(counting) == 1 else "number"
        found.append(f"{_columns(counting)} only {verb} the rows: leave out with &ignore={_names(counting)}")
    if unique:
        have = "has" if len(unique) == 1 else "have"
        found.append(
            f"{_columns(unique)} {have} another whole number in every row: "
            f"if these are ids, leave out with &ignore={_names(unique)}"
        )
    return found


def owners_without_training(data: DataSet) -> str:
    """One line about owners all of whose samples are in the test part: they cannot be clients; "" if there are none."""
    if data.owners_train is None or data.owners_test is None:
        return ""
    trained, tested = set(data.owners_train.tolist()), set(data.owners_test.tolist())
    count, total = len(tested - trained), len(tested | trained)
    return f"{count} of {total} owners have test samples only, so they are no clients" if count else ""


def owners_ignored(data: DataSet, split: str) -> str:
    """One line about owners that a split takes no notice of; "" if there are none, or it is by owner."""
    if data.owners_train is None or "natural" in split:
        return ""
    count = len(np.unique(data.owners_train))
    return f"the samples have {count} owners, which this split ignores: the split natural makes each a client"


def large_numbers(x: Array) -> str:
    """One line about vectors whose numbers are too large for a net to learn from; "" for others, and for images."""
    largest = float(np.abs(x).max()) if x.dtype == np.float32 and x.size else 0.0
    if largest <= LARGE:
        return ""
    return (
        f"the samples have numbers up to {largest:.3g}, which are not scaled: a net learns best from numbers around 1, "
        "so divide them, or subtract means and divide by standard deviations"
    )


def _follow_each_other(values: Array) -> bool:
    """Whether sorted values are a, a + 1, a + 2, ...; NaN comes last, so a column with gaps does not qualify."""
    return len(values) > MANY and bool((np.diff(values) == 1).all())


def _all_differ(values: Array) -> bool:
    """Whether sorted values are whole numbers, no two of them the same."""
    return len(values) > MANY and bool((values == np.floor(values)).all() and (np.diff(values) > 0).all())


def _columns(names: list[str]) -> str:
    return ("column " if len(names) == 1 else "columns ") + ", ".join(names)


def _names(names: list[str]) -> str:
    """Names as the options after a path take them."""
    return ",".join(name.replace("%", "%25").replace("&", "%26") for name in names)
