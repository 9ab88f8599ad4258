"""What the user of a table should know about its columns before a run, in one line each."""

from __future__ import annotations

import numpy as np

from fedskew.data.dataset import Array, DataSet

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
