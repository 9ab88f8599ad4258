"""A CSV table as a data set: a column of classes, an optional one of owners, features of numbers or categories.

A column is of numbers if all its values are, and of categories if none is; `?categorical=a,b` makes columns of numbers
categories. An empty cell, ?, NA, N/A, nan and null (in capitals or not) are missing values.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedskew.core.settings import UsageError, unknown
from fedskew.data.dataset import Array, Arrays, Column, holdout_mask, number_of, one_in, split_off_test
from fedskew.data.sources.formats import reading
from fedskew.data.table import LARGEST, PreparedColumn, canonical, ordered

USUAL_LABELS = ("label", "target", "class", "y")
MISSING = ("", "?", "na", "n/a", "nan", "null")
MANY = 50  # different words from which a column is not taken for categories
DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")


@dataclass(frozen=True)
class Columns:
    """Which columns are what, as in `patients.csv?label=diagnosis&owner=hospital&categorical=ward`.

    label: the column of classes; "": the one called label, target, class or y.
    owner: the column that says who made each sample; "": none.
    categorical: columns of numbers that are codes of categories, separated by commas.
    ignore: columns that are not used, such as names and dates, separated by commas.
    """

    label: str = ""
    owner: str = ""
    categorical: str = ""
    ignore: str = ""

    def named(self) -> list[str]:
        """All columns that are named."""
        return [*filter(None, (self.label, self.owner)), *_list(self.categorical), *_list(self.ignore)]


def _list(text: str) -> list[str]:
    return [name for name in (part.strip() for part in text.split(",")) if name]


@dataclass(frozen=True)
class Cells:
    """The cells of a table as text, by column; `lines` are the numbers of the rows in the file."""

    path: Path
    columns: dict[str, list[str]]
    lines: list[int]


def read_cells(path: Path) -> Cells:
    """Read a table with a header; the separator is a comma, a semicolon or a tab."""
    with reading(path), path.open(newline="", encoding="utf-8-sig") as stream:
        try:
            first = stream.readline()
            stream.read()
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise ValueError(f"it is not UTF-8 text (byte {byte:#x}), expected a table saved as UTF-8") from None
        stream.seek(0)
        reader = csv.reader(stream, delimiter=_separator(first))
        header = [cell.strip() for cell in next(reader, [])]
        if len(set(header)) != len(header):
            raise ValueError(f"its header has '{max(header, key=header.count)}' twice, expected different names")
        if not header or all(number_of(name) is not None for name in header):
            raise ValueError("its first row has no names, expected the names of the columns")
        rows, lines = [], []
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise ValueError(f"row {reader.line_num} has {len(row)} cells, expected {len(header)} as in the header")
            rows.append([cell.strip() for cell in row])
            lines.append(reader.line_num)
    if not rows:
        raise UsageError(f"{path} has no rows: expected a header and one row per sample.")
    columns = {name: [row[i] for row in rows] for i, name in enumerate(header)}
    if "" in columns and _says_nothing(columns[""]):
        del columns[""]
    elif "" in columns:
        raise UsageError(
            f"{path} has no name in its header for column {header.index('') + 1}: expected a name for each column "
            "(pandas leaves out the name of its index; to_csv with index=False does not write it)."
        )
    return Cells(path, columns, lines)


def _separator(header: str) -> str:
    """The separator that gives a header the most names; one inside quotes does not count."""
    return max(",;\t", key=lambda mark: len(next(csv.reader([header], delimiter=mark), [])))


def _says_nothing(cells: Sequence[str]) -> bool:
    """Whether cells are empty, as after a separator at the end of each line, or number the rows, as pandas does."""
    return not any(cells) or any(list(cells) == [str(start + i) for i in range(len(cells))] for start in (0, 1))


def read_table(path: Path, columns: Columns) -> tuple[Arrays, tuple[Column, ...]]:
    """The arrays of a table (features as `DataSet` holds them, a fifth of each class for testing) and its columns."""
    cells = read_cells(path)
    label = _label(cells, columns)
    for name in filter(None, (label, columns.owner)):
        _check_complete(cells, name)
        _check_spelling(cells, name)
    _check_classes(cells, label)
    if 2 * len(set(cells.columns[label])) > len(cells.lines):
        raise UsageError(
            f"{path}: column '{label}' has {len(set(cells.columns[label]))} different values in {len(cells.lines)} "
            f"rows, too many for classes: expected the column of classes, as in {path}?label=..."
        )
    others = {label, columns.owner, *_list(columns.ignore)}
    features = [name for name in cells.columns if name not in others]
    if not features:
        raise UsageError(f"{path} has no column beside '{label}': expected at least one feature.")
    named = _list(columns.categorical)
    made = [_categories(cells, name) if _is_categorical(cells, name, named) else (name, ()) for name in features]
    kinds = tuple(Column(name, categories) for name, categories in made)
    x = np.stack([_values(cells, kind) for kind in kinds], axis=1)
    arrays: Arrays = {"x_train": x, "y_train": np.array(cells.columns[label])}
    if columns.owner:
        arrays["u_train"] = np.array(cells.columns[columns.owner])
    return split_off_test(arrays, holdout_mask(arrays["y_train"], one_in(5))), kinds


def read_rows(path: Path, columns: Sequence[PreparedColumn], label: str = "") -> tuple[Array, list[str] | None]:
    """New samples for a model that was trained on a table: (values as `TableInput` takes them, their classes).

    columns: those of the model. Other columns are not used. Categories that the model does not know are missing.
    label: the column of classes, if they are known; "" gives None.
    """
    cells = read_cells(path)
    if absent := [c.name for c in columns if c.name not in cells.columns]:
        raise UsageError(
            f"{path} has no column '{absent[0]}', which the model needs: expected {', '.join(c.name for c in columns)}."
        )
    if label and label not in cells.columns:
        raise unknown("column", label, cells.columns)
    x = []
    for c in columns:
        code = dict(zip(c.categories, c.values, strict=True))
        if not c.categories:
            x.append(_numbers(cells, c.name))
        else:
            x.append(np.array([code.get(canonical(cell), math.nan) for cell in cells.columns[c.name]]))
    return np.stack(x, axis=1), cells.columns[label] if label else None


def _label(cells: Cells, columns: Columns) -> str:
    header = list(cells.columns)
    for given in columns.named():
        if given not in header:
            raise unknown("column", given, header)
    rest = [name for name in header if name != columns.owner]
    usual = [name for wanted in USUAL_LABELS for name in rest if name.lower() == wanted]
    if not columns.label and not usual:
        raise UsageError(
            f"{cells.path} does not say which column holds the classes: expected '{cells.path}?label=COLUMN' "
            f"with one of its columns: {', '.join(rest)}."
        )
    return columns.label or usual[0]


def _is_missing(cell: str) -> bool:
    return cell.lower() in MISSING


def _check_complete(cells: Cells, name: str) -> None:
    for cell, line in zip(cells.columns[name], cells.lines, strict=True):
        if _is_missing(cell):
            raise UsageError(
                f"{cells.path}: row {line} has no value in column '{name}', expected one; fill it in or remove the row."
            )


def _check_spelling(cells: Cells, name: str) -> None:
    """Raise UsageError if a class or an owner is written as 1 and as 1.0: it would count as two."""
    seen: dict[str, str] = {}
    for cell in cells.columns[name]:
        if (other := seen.setdefault(canonical(cell), cell)) != cell and "." in other + cell:
            raise UsageError(
                f"{cells.path}: column '{name}' has '{other}' and '{cell}', which are the same number: "
                "expected one way of writing it."
            )


def _check_classes(cells: Cells, name: str) -> None:
    """Raise UsageError if the classes are measurements: many numbers, some of them with decimals."""
    different = set(cells.columns[name])
    numbers = [number_of(cell) for cell in different]
    if len(different) > MANY and None not in numbers and any(n != int(n) for n in numbers if n is not None):
        raise UsageError(
            f"{cells.path}: column '{name}' has {len(different)} different numbers with decimals, too many: "
            f"expected the column of classes, as in {cells.path}?label=..."
        )


def _is_categorical(cells: Cells, name: str, named: Sequence[str]) -> bool:
    """Whether a column is of categories: it is named so, or all its values are words. UsageError if they are mixed."""
    if name in named:
        return True
    known = [cell for cell in cells.columns[name] if not _is_missing(cell)]
    if not known or any(number_of(cell) is not None for cell in known):
        return False
    if comma := next((cell for cell in known if DECIMAL_COMMA.fullmatch(cell)), ""):
        raise _comma_error(cells, name, comma)
    different = len(set(known))
    if different > MANY or 2 * different > max(len(known), 10):
        raise UsageError(
            f"{cells.path}: column '{name}' has {different} different words in {len(known)} rows, too many for "
            f"categories: leave it out with ?ignore={name}, or give ?categorical={name} if they are."
        )
    return True


def _categories(cells: Cells, name: str) -> tuple[str, tuple[str, ...]]:
    return name, ordered(sorted({canonical(cell) for cell in cells.columns[name] if not _is_missing(cell)}))


def _values(cells: Cells, column: Column) -> Array:
    if not column.categories:
        return _numbers(cells, column.name)
    code = {name: float(i) for i, name in enumerate(column.categories)}
    return np.array([code.get(canonical(cell), math.nan) for cell in cells.columns[column.name]])


def _numbers(cells: Cells, name: str) -> Array:
    made = []
    for cell, line in zip(cells.columns[name], cells.lines, strict=True):
        value = math.nan if _is_missing(cell) else number_of(cell)
        if value is None and DECIMAL_COMMA.fullmatch(cell):
            raise _comma_error(cells, name, cell)
        if value is None or abs(value) > LARGEST:
            raise UsageError(
                f"{cells.path}: column '{name}' has '{cell}' in row {line}: expected a number; "
                f"leave the cell empty if it is missing, or give ?categorical={name} if the values are categories."
            )
        made.append(value)
    return np.array(made, np.float64)


def _comma_error(cells: Cells, name: str, cell: str) -> UsageError:
    return UsageError(
        f"{cells.path}: column '{name}' has '{cell}': expected numbers with a decimal point and without commas; "
        f"give ?categorical={name} if the values are categories."
    )
