"""Tables: filled and scaled by sums over the clients' training samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedskew.core.settings import UsageError
from fedskew.core.training import Training
from fedskew.data.dataset import Column
from fedskew.data.notes import id_columns, missing_values
from fedskew.data.sources.csv import read_rows
from fedskew.data.sources.loading import load
from fedskew.data.table import (
    ColumnSums,
    Preparation,
    TableInput,
    agree_on,
    canonical,
    prepared,
    sums_of,
)
from fedskew.deploy import handshake
from fedskew.experiment.assemble import assemble
from fedskew.experiment.config import Experiment, Holdout

NAN = float("nan")
COLUMNS = (Column("age"), Column("ward", ("a", "b")))


def of(*clients: Any, columns: tuple[Column, ...] = COLUMNS) -> Preparation:
    """The preparation of clients with these rows."""
    return agree_on({f"client {i}": sums_of(np.array(x, float), columns) for i, x in enumerate(clients)})


def test_heart_has_the_published_patients_of_each_hospital() -> None:
    data = load("heart").pooled()
    assert data.labels == ("healthy", "disease")
    assert data.owners == ("cleveland", "hungarian", "switzerland", "va")
    owners = data.owners_train
    assert owners is not None
    assert np.bincount(owners).tolist() == [303, 294, 123, 200]
    assert np.bincount(owners[data.y_train == 1]).tolist() == [139, 106, 115, 149]
    assert sum(missing_values(data).values()) == 1759


def test_the_licence_of_heart_is_beside_its_file() -> None:
    import fedskew

    notice = (Path(fedskew.__file__).parent / "data" / "sources" / "heart.NOTICE").read_text()
    assert "CC BY 4.0" in notice
    assert "Janosi" in notice


def test_means_and_scales_come_from_sums_and_gaps_are_filled_by_means() -> None:
    """Ages 1, 3 | 8: mean 4, variance (9 + 1 + 16) / 3. Wards a, b | b: shares 1/3 and 2/3, variance 2/9."""
    made = of([[1, 0], [3, 1]], [[8, 1]])
    age, ward = made.columns
    assert age.mean == (4.0,)
    assert age.scale[0] == pytest.approx((26 / 3) ** -0.5)
    assert ward.mean == pytest.approx((1 / 3, 2 / 3))
    assert ward.scale == pytest.approx(((2 / 9) ** -0.5,) * 2)
    assert made.features == ("age", "ward=a", "ward=b")
    rows = made.apply(np.array([[NAN, NAN], [4, 0]]), COLUMNS)
    assert rows[0].tolist() == [0, 0, 0]
    assert rows[1].tolist() == pytest.approx([0, (2 / 3) * (2 / 9) ** -0.5, -(2 / 3) * (2 / 9) ** -0.5])


def test_one_client_or_many_give_the_same_preparation() -> None:
    rng = np.random.default_rng(0)
    x = np.stack([rng.normal(1e9, 2, 60), rng.integers(0, 2, 60)], axis=1)
    x[rng.random(x.shape) < 0.3] = NAN
    whole, parts = of(x), of(x[:7], x[7:40], x[40:])
    assert whole.features == parts.features
    for a, b in zip(whole.columns, parts.columns, strict=True):
        assert a.mean == pytest.approx(b.mean, rel=1e-15)
        assert a.scale == pytest.approx(b.scale, rel=1e-6)
    known = x[~np.isnan(x[:, 0]), 0]
    assert 1 / whole.columns[0].scale[0] == pytest.approx(known.std(), rel=1e-6)


def test_a_column_that_is_often_missing_gets_an_indicator() -> None:
    made = of([[1, NAN], [2, NAN], [3, 0], [4, 1], [NAN, 1], [5, 1], [6, 0], [7, 1], [8, 0]])
    assert made.features == ("age", "ward=a", "ward=b", "ward missing")  # age lacks 1 of 9, ward 2 of 9
    here, gone = made.apply(np.array([[1, 0], [1, NAN]]), COLUMNS)[:, 3]
    assert here < 0 < gone
    assert made.describe({"age": 1, "ward": 2}) == (
        "filled 3 missing values in 2 columns by column means; indicator columns for ward"
    )


def test_constant_and_empty_columns_do_no_harm() -> None:
    """0.1 three times has a mean that is not 0.1: a scale by that rounding would blow up a new value."""
    columns = (Column("age"), Column("flat"), Column("gone"))
    made = of([[1, 0.1, NAN], [2, 0.1, NAN], [4, 0.1, NAN]], columns=columns)
    assert made.features == ("age", "flat")
    assert made.left_out == ("gone",)
    assert made.apply(np.array([[1, 5.0, 9.0]]), columns)[0, 1] == 0
    assert made.describe({"gone": 3}) == "left out gone, which no training sample has"
    with pytest.raises(UsageError, match="no value in any column"):
        of([[NAN, NAN]])


def test_a_category_that_no_training_sample_has_counts_as_missing() -> None:
    columns = (Column("ward", ("a", "b", "c")),)
    made = of([[0], [1], [0]], columns=columns)
    assert made.features == ("ward=a", "ward=b")
    assert made.apply(np.array([[2.0]]), columns).tolist() == [[0, 0]]


def test_categories_are_matched_by_name_whatever_their_order() -> None:
    made = of([[1, 0], [2, 1], [3, 1]])
    other = (Column("ward", ("b", "z", "a")), Column("more"), Column("age"))
    a = made.apply(np.array([[1, 0], [1, 1], [1, NAN]]), COLUMNS)
    b = made.apply(np.array([[2, 9, 1], [0, 9, 1], [1, 9, 1]]), other)
    assert np.array_equal(a, b)
    with pytest.raises(UsageError, match="no column 'age'"):
        made.apply(np.array([[1.0]]), (Column("ward", ("a",)),))


def test_whole_numbers_name_the_same_category_however_they_are_written() -> None:
    assert [canonical(text) for text in ("3", "3.0", "3e0", "3.5", "x3")] == ["3", "3", "3", "3.5", "x3"]


def write(folder: Path, rows: list[str], name: str = "t.csv", header: str = "age,ward,site,y") -> str:
    (folder / name).write_text("\n".join([header, *rows]) + "\n")
    return f"{folder / name}?label=y&owner=site"


def rows_of(count: int = 40) -> list[str]:
    return [f"{i if i % 4 else '?'},{'ab'[i % 3 > 0]},{'nse'[i % 3]},{i % 2}" for i in range(count)]


SMALL: dict[str, Any] = {"split": "natural", "model": "mlp:hidden=4", "rounds": 1, "training": Training(batch_size=8)}


def test_test_samples_do_not_influence_how_a_table_is_filled_and_scaled(tmp_path: Path) -> None:
    """Neither the server's test samples nor the clients' own: made huge, missing and of a new ward, nothing moves."""
    experiment = Experiment(data=load(write(tmp_path, rows_of())), **SMALL)
    before = assemble(experiment)
    trained = before.world.train.values.numpy()
    data = experiment.data
    assert not isinstance(data, str)
    x = data.x_train.copy()
    others = np.setdiff1d(np.arange(len(x)), trained)
    assert len(others) >= 3
    x[others, 0] = [1e6 if i % 2 else NAN for i in range(len(others))]
    x[others, 1] = 2
    columns = (data.columns[0], Column("ward", ("a", "b", "new")))
    x_test = np.full_like(data.x_test, 1e6)
    x_test[:, 1] = NAN
    after = assemble(replace(experiment, data=replace(data, x_train=x, x_test=x_test, columns=columns)))
    assert after.table == before.table
    assert np.array_equal(after.data.x_train[trained], before.data.x_train[trained])
    assert after.world.test.values.equal(before.world.test.values)


def test_clients_that_never_train_do_not_influence_it_either(tmp_path: Path) -> None:
    experiment = Experiment(data=load(write(tmp_path, rows_of())), **SMALL, holdout=Holdout(newcomers=1))
    before = assemble(experiment)
    data = experiment.data
    assert not isinstance(data, str)
    x = data.x_train.copy()
    x[before.partition.clients[before.newcomers[0]], 0] = 1e6
    assert assemble(replace(experiment, data=replace(data, x_train=x))).table == before.table


def test_a_table_with_gaps_trains_and_says_what_was_filled(tmp_path: Path, fedskew: Any) -> None:
    said = fedskew("run", "--data", write(tmp_path, rows_of()), "--split", "natural", "--rounds", "1", "--workers", "1")
    assert said.code == 0
    assert "filled 10 missing values in 1 column by column means" in said.out
    assert "nan" not in said.out


def test_the_query_makes_codes_categories_and_leaves_columns_out(tmp_path: Path) -> None:
    rows = [f"{i % 3}.0,{'p' + str(i)},{i % 2}" for i in range(12)]
    path = write(tmp_path, rows, header="code,name,y").partition("?")[0]
    data = load(f"{path}?label=y&categorical=code&ignore=name")
    assert data.columns == (Column("code", ("0", "1", "2")),)


def test_new_rows_are_read_in_the_columns_of_the_model(tmp_path: Path) -> None:
    """Columns in another order, one more, a gap, and a ward the model does not know."""
    made = of([[1, 0], [2, 1], [3, 1]])
    path = write(tmp_path, ["b,7,x", "?,8,x", "new,n/a,x"], header="ward,age,note").partition("?")[0]
    x, labels = read_rows(Path(path), made.columns)
    assert labels is None
    assert np.array_equal(x, [[7, 1], [8, NAN], [NAN, NAN]], equal_nan=True)
    with pytest.raises(UsageError, match="no column 'age', which the model needs: expected age, ward"):
        read_rows(Path(write(tmp_path, ["a"], header="ward").partition("?")[0]), made.columns)
    bad = write(tmp_path, ["a,old"], header="ward,age").partition("?")[0]
    with pytest.raises(UsageError, match="column 'age' has 'old' in row 2: expected a number"):
        read_rows(Path(bad), made.columns)


# Between sites.


def test_sites_agree_on_what_one_file_of_all_their_rows_gives(tmp_path: Path) -> None:
    """Site a has numbers only where site b has gaps, and other wards."""
    a = load(write(tmp_path, [f"{i},w{i % 2},s,{i % 2}" for i in range(20)], "a.csv"))
    b = load(write(tmp_path, [f"{'' if i % 2 else i},w{i % 3},s,{i % 2}" for i in range(20)], "b.csv"))
    task = handshake.agree({"a": handshake.facts_of(a), "b": handshake.facts_of(b)})
    assert task.table is not None
    assert task.table.features == ("age", "age missing", "ward=w0", "ward=w1", "ward=w2")
    assert (task.kind, task.shape) == ("float32", (5,))
    ages = np.concatenate([a.x_train[:, 0], b.x_train[:, 0]])
    assert task.table.columns[0].mean[0] == pytest.approx(np.nanmean(ages))
    assert 1 / task.table.columns[0].scale[0] == pytest.approx(np.nanstd(ages))
    again = msgspec.json.decode(msgspec.json.encode(task), type=type(task))
    assert np.array_equal(handshake.relabelled(b, again).x_train, prepared(b, task.table).x_train)
    facts = {"a": handshake.facts_of(a), "b": handshake.facts_of(b)}
    assert "filled 8 missing values in 1 column" in handshake.describe_filling(task, facts)


def sums(name: str = "age", rows: int = 4, present: int = 4, **fields: Any) -> ColumnSums:
    return ColumnSums(name, rows, present, **fields)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (sums("edge"), "site b and site a have different columns"),
        (sums(present=5), "site b: column 'age' counts more values than samples"),
        (sums(total=NAN), "not finite"),
        (sums(squares=-1.0), "not finite"),
        (sums(total=1e200), "site b: column 'age' has sums of numbers above 1e"),
        (sums(total=-1.7e308), "has sums of numbers above"),
        (sums(squares=1.7e308), "has sums of numbers above"),
        (sums(present=0, total=1.0), "has sums of numbers above"),
        (sums(counts={"x": 1}), "do not add up"),
        (sums(counts={"x": 4, "y": 0}), "do not add up"),
        (sums(counts={"x": 5, "y": -1}), "do not add up"),
        (sums(counts={"x": 4}), "column 'age' has categories at site b and numbers at site a"),
    ],
)
def test_sums_of_a_site_that_cannot_be_true_name_the_site(other: ColumnSums, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        agree_on({"site a": [sums(total=8.0)], "site b": [other]})


def test_a_site_without_any_value_in_a_column_fits_both_kinds() -> None:
    empty = sums(present=0)
    assert agree_on({"a": [empty], "b": [sums(counts={"x": 4})]}).features == ("age=x", "age missing")
    assert agree_on({"a": [empty], "b": [sums(total=4.0)]}).features == ("age", "age missing")


def test_columns_that_number_the_rows_or_look_like_ids_are_named(tmp_path: Path) -> None:
    """`age` has whole numbers, too, but some of them twice; a short table is left alone. The advice works as it is."""
    rows = [f"{100 + i},{i * i * 7919},{30 + i % 40},{i * 0.7:.1f},{'ab'[i % 2]}" for i in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["Unnamed: 0,C+%,age,dose,label", *rows]))
    counting, unique = id_columns(load(str(tmp_path / "t.csv")))
    assert counting == "column Unnamed: 0 only numbers the rows: leave out with &ignore=Unnamed: 0"
    assert unique == (
        "column C+% has another whole number in every row: if these are ids, leave out with &ignore=C+%25"
    )
    assert len(id_columns(load(f"{tmp_path / 't.csv'}?label=label&ignore=Unnamed: 0"))) == 1
    assert id_columns(load(f"{tmp_path / 't.csv'}?label=label&ignore=Unnamed: 0,C+%25")) == []
    (tmp_path / "t.csv").write_text("\n".join(["id,pid,age,dose,label", *rows[:20]]))
    assert id_columns(load(str(tmp_path / "t.csv"))) == []


def test_a_column_of_many_categories_needs_little_memory_and_gives_the_same_inputs() -> None:
    """A matrix of inputs by inputs would have 9 million entries; nothing that is kept grows with their square."""
    names = tuple(f"c{i:04d}" for i in range(3000))
    columns = (Column("age"), Column("code", names), Column("ward", ("a", "b")))
    codes = np.arange(3000.0)
    x = np.stack([codes % 7, codes, np.where(codes % 3 == 0, np.nan, codes % 2)], axis=1)
    made = of(x, columns=columns)
    module = TableInput(made)
    assert max(buffer.numel() for buffer in module.buffers()) == len(made.features) == 3004
    inputs = made.apply(x, columns)
    for j, column in enumerate(made.columns[1:], start=1):  # each category by hand
        start = made.features.index(f"{column.name}={column.categories[0]}")
        for row in (0, 1, 5, 2999):
            for k, (mean, scale) in enumerate(zip(column.mean, column.scale, strict=True)):
                known = not np.isnan(x[row, j])
                expected = ((x[row, j] == k) - mean) * scale if known else 0.0
                assert inputs[row, start + k] == pytest.approx(expected, rel=1e-6)
    missing = made.features.index("ward missing")
    assert (inputs[:, missing] > 0).tolist() == np.isnan(x[:, 2]).tolist()


def test_the_largest_numbers_that_a_table_may_have_are_agreed_on() -> None:
    """One site has -1e100 four times, the other 1e100: the mean is 0 and the deviation 1e100."""
    (column,) = agree_on({"a": [sums(total=-4e100)], "b": [sums(total=4e100)]}).columns
    assert column.mean == (0.0,)
    assert column.scale == pytest.approx((1e-100,))


def test_owners_whose_only_samples_are_for_testing_are_counted(tmp_path: Path) -> None:
    """Every patient is an owner, and a fifth of the 40 patients are in the test part."""
    rows = [f"{i % 7},p{i},{'ab'[i % 2]}" for i in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["x,patient,label", *rows]))
    path = f"{tmp_path / 't.csv'}?label=label&owner=patient"
    natural = assemble(Experiment(data=path, split="natural", rounds=1))
    assert natural.notes == ("8 of 40 owners have test samples only, so they are no clients",)
    ignored = "the samples have 32 owners, which this split ignores: the split natural makes each a client"
    assert assemble(Experiment(data=path, split="iid:clients=2", rounds=1)).notes == (ignored,)
    assert assemble(Experiment(data="heart", split="natural", rounds=1)).notes[0].startswith("filled")
