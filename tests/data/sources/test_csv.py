"""Tables as programs and people write them: what would be misread is refused with the cure in the sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedskew.core.settings import UsageError
from fedskew.data.dataset import Column
from fedskew.data.sources.loading import load


def table(folder: Path, header: str, row: str, rows: int = 60, encoding: str = "utf-8") -> str:
    """A file with this header and rows, in which {i} is the row's number and {y} its class."""
    lines = [header, *(row.format(i=i, k=i % 4, y=("ill", "well")[i % 3 == 0]) for i in range(rows))]
    (folder / "t.csv").write_bytes("\n".join(lines).encode(encoding))
    return str(folder / "t.csv")


@pytest.mark.parametrize(
    ("header", "row", "words"),
    [
        ("temp;label", "3{k},{k};{y}", "has '30,0': expected numbers with a decimal point and without commas"),
        ("temp;label", "3{k}{k};{y}\n36,6;{y}", "has '36,6': expected numbers with a decimal point"),
        ("cells,label", '"1,10{k}",{y}', "has '1,100': expected numbers with a decimal point and without commas"),
        ("age,label", "{i},1\n{i},1.0\n{i},0", "column 'label' has '1' and '1.0', which are the same number"),
        ("age,label", "{i},{i}.5\n{i},{i}.5\n{i},{i}.5", "60 different numbers with decimals, too many: expected"),
        (",age,label", "{i}7,{k},{y}", "has no name in its header for column 1: expected a name for each"),
    ],
)
def test_what_would_be_misread_is_one_sentence(tmp_path: Path, header: str, row: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(table(tmp_path, header, row))
    assert words in str(caught.value)


def test_numbers_with_a_decimal_comma_may_be_categories_if_one_says_so(tmp_path: Path) -> None:
    path = table(tmp_path, "temp;label", "3{k},{k};{y}")
    assert load(f"{path}?label=label&categorical=temp").columns[0].categories == ("30,0", "31,1", "32,2", "33,3")


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_table_that_is_not_utf_8_says_so(tmp_path: Path, encoding: str) -> None:
    with pytest.raises(UsageError, match=r"it is not UTF-8 text .*, expected a table saved as UTF-8"):
        load(table(tmp_path, "gr\u00f6\u00dfe,label", "{i},{y}", encoding=encoding))


def test_a_separator_inside_quotes_does_not_count(tmp_path: Path) -> None:
    data = load(table(tmp_path, '"age, in years, at visit";dose;label', "{k};{i}.5;{y}"))
    assert [column.name for column in data.columns] == ["age, in years, at visit", "dose"]


@pytest.mark.parametrize(("header", "row"), [(",age,label", "{i},{k},{y}"), ("age,label,", "{k},{y},")])
def test_a_nameless_column_that_says_nothing_is_left_out(tmp_path: Path, header: str, row: str) -> None:
    """The index that pandas writes, and what follows a separator at the end of each line."""
    assert load(table(tmp_path, header, row)).columns == (Column("age"),)


def test_a_column_may_have_a_plus_in_its_name(tmp_path: Path) -> None:
    path = table(tmp_path, "HER2+,age,label", "{k},{i},{y}")
    assert load(f"{path}?label=label&ignore=HER2+").columns == (Column("age"),)


def test_owners_with_leading_zeros_are_different_owners(tmp_path: Path) -> None:
    path = table(tmp_path, "age,site,label", "{i},7,{y}\n{i},007,{y}")
    assert load(f"{path}?label=label&owner=site").owners == ("007", "7")
