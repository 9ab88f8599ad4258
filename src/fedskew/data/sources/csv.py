"""A CSV table as a data set: one column of classes, an optional one of owners, the others numeric features."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedskew.core.settings import UsageError, unknown
from fedskew.data.dataset import Array, Arrays, holdout_mask, one_in, split_off_test
from fedskew.data.sources.formats import reading

USUAL_LABELS = ("label", "target", "class", "y")
MISSING = ("", "na", "n/a", "nan", "null", "none", "?")


@dataclass(frozen=True)
class Columns:
    """Which columns are not features, as in `patients.csv?label=diagnosis&owner=hospital`.

    label: the column of classes; "": the one called label, target, class or y, else the last.
    owner: the column that says who made each sample; "": none.
    """

    label: str = ""
    owner: str = ""


def read_table(path: Path, columns: Columns) -> Arrays:
    """The arrays of a table: features standardised, classes and owners as text, a fifth of each class for testing."""
    with reading(path), path.open(newline="", encoding="utf-8-sig") as stream:
        first = stream.readline()
        stream.seek(0)
        reader = csv.reader(stream, delimiter=max(",;\t", key=first.count))
        header = [cell.strip() for cell in next(reader, [])]
        label, owner = _choose_columns(header, columns)
        rows, numbers = [], []
        for row in reader:
            if row:
                rows.append(_checked_row(row, header, reader.line_num))
                numbers.append(reader.line_num)
    if not rows:
        raise UsageError(f"{path} has no rows: expected a header and one row per sample.")
    cells = {name: [row[i] for row in rows] for i, name in enumerate(header)}
    if 2 * len(set(cells[label])) > len(rows):
        raise UsageError(
            f"{path}: column '{label}' has {len(set(cells[label]))} different values in {len(rows)} rows, "
            f"too many for classes: expected the column of classes, as in {path}?label=..."
        )
    features = [name for name in header if name not in (label, owner)]
    if not features:
        raise UsageError(f"{path} has no column beside '{label}': expected at least one numeric feature.")
    x = np.stack([_numbers(path, name, cells[name], numbers) for name in features], axis=1)
    arrays: Arrays = {"x_train": x, "y_train": np.array(cells[label])}
    if owner:
        arrays["u_train"] = np.array(cells[owner])
    return _standardise(split_off_test(arrays, holdout_mask(arrays["y_train"], one_in(5))))


def _choose_columns(header: list[str], columns: Columns) -> tuple[str, str]:
    if len(set(header)) != len(header):
        raise ValueError(f"its header has '{max(header, key=header.count)}' twice, expected different names")
    if not header or all(_number(name) is not None for name in header):
        raise ValueError("its first row has no names, expected the names of the columns")
    for given in filter(None, (columns.label, columns.owner)):
        if given not in header:
            raise unknown("column", given, header)
    rest = [name for name in header if name != columns.owner]
    usual = [name for wanted in USUAL_LABELS for name in rest if name.lower() == wanted]
    return columns.label or (usual or rest)[0 if usual else -1], columns.owner


def _checked_row(row: list[str], header: list[str], line: int) -> list[str]:
    if len(row) != len(header):
        raise ValueError(f"row {line} has {len(row)} cells, expected {len(header)} as in the header")
    cells = [cell.strip() for cell in row]
    for name, cell in zip(header, cells, strict=True):
        if cell.lower() in MISSING:
            raise ValueError(f"row {line} has no value in column '{name}', expected one; fill it in or remove the row")
    return cells


def _number(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _numbers(path: Path, name: str, cells: list[str], lines: list[int]) -> Array:
    values = [_number(cell) for cell in cells]
    if None in values:
        bad = values.index(None)
        raise UsageError(
            f"{path}: column '{name}' has '{cells[bad]}' in row {lines[bad]}: expected a number; "
            "encode the column as numbers or remove it."
        )
    return np.array(values, np.float64)


def _standardise(arrays: Arrays) -> Arrays:
    """Each feature minus its training mean, divided by its training standard deviation; 0 if it is constant."""
    train = arrays["x_train"]
    mean, std = train.mean(axis=0), train.std(axis=0)
    constant = train.min(axis=0) == train.max(axis=0)  # not std == 0: the mean of equal numbers may be rounded
    scale = np.where(constant, 1, std)
    return arrays | {key: np.where(constant, 0, (arrays[key] - mean) / scale) for key in ("x_train", "x_test")}
