"""Counts add up exactly, and the figures made from them are scikit-learn's on the pooled predictions."""

from __future__ import annotations

import base64
import math
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sk
from torch import nn

from fedskew.evaluation.bins import BINS, Predictions
from fedskew.evaluation.counts import LEVELS, Counts
from fedskew.evaluation.scores import ClientScore, Score, Together, score_of
from fedskew.evaluation.sent_counts import from_text, to_text
from fedskew.evaluation.summary import Summary


def drawn(seed: int, n: int, classes: int, scale: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that know something about the labels, and the labels, of which early ones are more frequent."""
    rng = torch.Generator().manual_seed(seed)
    y = (torch.rand(n, generator=rng) ** 2 * classes).long()
    logits = scale * (torch.randn(n, classes, generator=rng) + nn.functional.one_hot(y, classes))
    return logits, y


def predictions(logits: torch.Tensor, y: torch.Tensor) -> Predictions:
    return Predictions(logits.log_softmax(1), y, logits.argmax(1))


@pytest.mark.parametrize(("classes", "n", "scale"), [(2, 400, 2.0), (2, 50, 0.1), (5, 300, 1.0), (10, 1000, 10.0)])
def test_figures_of_a_model_are_those_of_scikit_learn(classes: int, n: int, scale: float) -> None:
    logits, y = drawn(3, n, classes, scale)
    found = score_of(logits, y, classes).metrics()
    p, said = logits.softmax(1).double().numpy(), logits.argmax(1)
    p /= p.sum(axis=1, keepdims=True)
    assert found.accuracy == sk.accuracy_score(y, said)
    assert found.balanced_accuracy == pytest.approx(sk.balanced_accuracy_score(y, said), abs=1e-12)
    for kind in ("macro", "weighted"):
        wanted = sk.f1_score(y, said, average=kind, zero_division=0)
        assert getattr(found, f"{kind}_f1") == pytest.approx(wanted, abs=1e-12)
    precision, recall, f1, _ = sk.precision_recall_fscore_support(y, said, labels=range(classes), zero_division=0)
    assert [v or 0 for v in found.precision] == pytest.approx(precision.tolist())
    assert [v or 0 for v in found.per_class] == pytest.approx(recall.tolist())
    assert [v or 0 for v in found.f1] == pytest.approx(f1.tolist())
    counts = Counts.of(predictions(logits, y))
    assert counts.confusion.tolist() == sk.confusion_matrix(y, said, labels=range(classes)).tolist()
    roc = sk.roc_auc_score(y, p[:, 1] if classes == 2 else p, multi_class="ovr", labels=range(classes))
    assert counts.auroc_error is not None
    assert counts.auroc_error < 0.02
    assert found.auroc == pytest.approx(roc, abs=counts.auroc_error + 1e-6)
    truth = np.eye(classes)[y]
    average = [sk.average_precision_score(truth[:, c], p[:, c]) for c in range(classes)]
    assert counts.auprc_error is not None
    wanted = average[1] if classes == 2 else np.mean(average)
    assert found.auprc == pytest.approx(wanted, abs=counts.auprc_error + 1e-6)
    assert found.auprc == pytest.approx(wanted, abs=0.02)


def test_the_calibration_error_is_worked_by_hand() -> None:
    """Three samples said with probability 0.8, two of them right; one with 0.6, right.

    Bins of width 1/15: 0.8 and 0.6 fall apart. Errors |2 - 2.4| and |1 - 0.6|, together 0.8 of 4 samples.
    """
    p = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.8, 0.2], [0.4, 0.6]])
    found = Counts.of(Predictions(p.log(), torch.tensor([0, 0, 1, 1]), p.argmax(1)))
    assert found.ece == pytest.approx(0.2, abs=1e-6)


def test_the_calibration_error_is_that_of_its_definition() -> None:
    logits, y = drawn(5, 500, 4)
    chance, said = logits.softmax(1).max(1)
    level = (chance * LEVELS).long().clamp(max=LEVELS - 1)
    right = (said == y).double()
    gaps = [abs(float((right[level == b] - chance[level == b].double()).sum())) for b in range(LEVELS)]
    assert Counts.of(predictions(logits, y)).ece == pytest.approx(sum(gaps) / len(y), abs=1e-6)


def test_a_model_that_gives_all_samples_the_same_score_has_an_area_of_one_half() -> None:
    """And its average precision is the share of the class: 3 of 10."""
    y = torch.tensor([1] * 3 + [0] * 7)
    found = Counts.of(predictions(torch.tensor([[3.0, -1.0]]).expand(10, 2), y))
    assert found.auroc == 0.5
    assert found.auprc == pytest.approx(0.3)


@pytest.mark.parametrize("offset", [-30.0, -12.0, 0.0, 12.0])
def test_the_area_is_right_also_where_all_probabilities_are_extreme(offset: float) -> None:
    """A rare class whose probability is 1e-5 everywhere is ranked all the same; beyond float32 all are tied."""
    rng = torch.Generator().manual_seed(0)
    y = (torch.rand(500, generator=rng) < 0.1).long()
    logit = torch.randn(500, generator=rng) + y + offset
    found = Counts.of(predictions(torch.stack([torch.zeros(500), logit], 1), y))
    assert found.auroc == pytest.approx(sk.roc_auc_score(y, logit), abs=0.3 if offset < -17 else 0.005)
    assert found.auroc_error is not None
    assert abs(found.auroc - sk.roc_auc_score(y, logit)) <= found.auroc_error + 1e-9


def test_classes_without_samples_are_left_out_of_means() -> None:
    """Classes 0 and 1 have a sample each and are ranked right; class 2 has none: the mean is over two."""
    logits = torch.tensor([[5.0, 0.0, 0.0], [0.0, 5.0, 0.0]])
    found = score_of(logits, torch.tensor([0, 1]), 3).metrics()
    assert (found.auroc, found.auprc, found.balanced_accuracy) == (1.0, 1.0, 1.0)
    alone = score_of(logits[:1], torch.tensor([0]), 3).metrics()
    assert (alone.auroc, alone.auprc) == (None, None)


def test_predictions_that_are_not_numbers_are_counted_as_wrong_and_tied() -> None:
    y = torch.tensor([0, 1, 1])
    found = Counts.of(predictions(torch.full((3, 2), float("nan")), y))
    assert found.samples == 3
    assert found.auroc == 0.5
    assert found.ece <= 1


@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(2, 4), st.integers(0, 99))
def test_the_counts_of_clients_add_up_to_those_of_all_samples_together(
    sizes: list[int], classes: int, seed: int
) -> None:
    logits, y = drawn(seed, sum(sizes), classes)
    whole = Counts.of(predictions(logits, y))
    parts = [Counts.of(predictions(x, labels)) for x, labels in zip(logits.split(sizes), y.split(sizes), strict=True)]
    assert Counts.sum(parts, classes) == whole
    assert Counts.sum(reversed(parts), classes) == whole


@given(st.integers(0, 30), st.integers(1, 4), st.integers(0, 99))
def test_counts_survive_a_message(n: int, classes: int, seed: int) -> None:
    counts = Counts.of(predictions(*drawn(seed, n, classes)))
    assert from_text(to_text(counts), classes) == counts


def test_pooled_figures_are_of_all_predictions_and_not_means_over_clients() -> None:
    """Two clients, pooled by hand: what scikit-learn says about the concatenation."""
    logits, y = drawn(1, 60, 3)
    summary = Summary()
    for client, (start, end) in enumerate([(0, 50), (50, 60)]):
        one = score_of(logits[start:end], y[start:end], 3)
        summary.add(ClientScore(client, one, one, fallback=False))
    population = summary.metrics(False, {}).clients
    assert population is not None
    found = population.personal
    said = logits.argmax(1)
    assert found.macro_f1 == pytest.approx(sk.f1_score(y, said, average="macro"), abs=1e-12)
    each = [sk.f1_score(y[p], said[p], average="macro") for p in (slice(0, 50), slice(50, 60))]
    assert found.over.macro_f1 is not None
    assert found.over.macro_f1.mean == pytest.approx(np.mean(each), abs=1e-12)
    assert found.over.macro_f1.worst_decile == pytest.approx(min(each), abs=1e-12)
    assert found.over.macro_f1.mean != pytest.approx(found.macro_f1, abs=1e-3)
    rows = summary.rows()
    assert rows["1"].personal.macro_f1 == pytest.approx(each[1], abs=1e-12)
    assert rows["1"].personal.auroc == Counts.of(predictions(logits[50:], y[50:])).auroc
    assert summary.confusion() == {"clients": sk.confusion_matrix(y, said).tolist()}


@pytest.mark.parametrize("own", [(2, 5), ()])
def test_the_figures_do_not_depend_on_how_predictions_are_counted(
    own: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, together with others, some before and some after; with clients of their own model in between or not."""
    logits, y = drawn(2, 90, 3)
    parts = list(zip(logits.split(15), y.split(15), strict=True))

    def found(together: int, counted: bool) -> object:
        monkeypatch.setattr("fedskew.evaluation.tally.TOGETHER", together)
        summary = Summary(frozenset({5}))
        for client, (x, labels) in enumerate(parts):
            shared = score_of(x, labels, 3)
            personal = score_of(x.flip(1), labels, 3) if client in own else shared
            if counted:
                same = personal is shared
                shared = replace(shared, made=shared.counts)
                personal = shared if same else replace(personal, made=personal.counts)
            summary.add(ClientScore(client, shared, personal, fallback=False))
        return summary.metrics(False, {}), summary.rows(), summary.confusion()

    assert found(10**9, False) == found(0, False) == found(0, True) == found(100, False)


def test_what_is_added_after_the_figures_were_read_counts_too() -> None:
    logits, y = drawn(2, 60, 3)
    read, whole = Summary(), Summary()
    for start in (0, 20, 40):
        read.add_test(score_of(logits[start : start + 20], y[start : start + 20], 3))
        assert sum(read.metrics(False, {}).global_.samples) == start + 20  # type: ignore[union-attr]
    whole.add_test(score_of(logits, y, 3))
    assert read.confusion() == whole.confusion()
    assert read.metrics(False, {}).global_.auroc == whole.metrics(False, {}).global_.auroc  # type: ignore[union-attr]


def test_clients_evaluated_together_have_the_figures_of_each_added_alone() -> None:
    """All of them, also where a newcomer is among them; and those that never trained are counted."""
    logits, y = drawn(4, 47, 3)
    sizes, clients = [20, 3, 24], (4, 6, 9)
    losses = [score_of(x, labels, 3).loss for x, labels in zip(logits.split(sizes), y.split(sizes), strict=True)]
    scored = Together(predictions(logits, y), sizes, losses)
    for newcomers in (frozenset[int](), frozenset({6})):
        together, alone = Summary(newcomers), Summary(newcomers)
        together.add_together(clients, scored, [6, 9])
        for client, one in zip(clients, scored.scores(), strict=True):
            alone.add(ClientScore(client, one, one, fallback=client != 4))
        assert together.metrics(False, {}) == alone.metrics(False, {})
        assert together.rows() == alone.rows()
        assert together.confusion() == alone.confusion()
        found = together.metrics(False, {})
        assert found.clients is not None
        assert found.clients.never_trained == 2 - len(newcomers)


def test_a_client_that_sends_no_counts_leaves_the_accuracies() -> None:
    """A site of an earlier version: what needs its predictions is unknown, for all together."""
    logits, y = drawn(2, 20, 2)
    one = score_of(logits, y, 2)
    summary = Summary()
    summary.add(ClientScore(0, one, one, fallback=False))
    summary.add(ClientScore(1, Score((1, 1), (2, 2), 0.5), Score((1, 1), (2, 2), 0.5), fallback=False))
    population = summary.metrics(False, {}).clients
    assert population is not None
    assert population.personal.clients == 2
    assert population.personal.macro_f1 is None
    assert population.personal.balanced is None
    assert summary.rows()["1"].personal.macro_f1 is None


def sent(*numbers: int, classes: int = 2) -> Counts:
    return from_text(base64.b64encode(zlib.compress(np.array(numbers, "<i8").tobytes())).decode(), classes)


@pytest.mark.parametrize(
    "change",
    [
        {"cell": 4},  # outside the table of two classes
        {"cell": -1},
        {"count": 2},  # one sample that is counted twice
        {"count": -1},
        {"place": 2 * BINS * 2},
        {"place": 1 << 62},
        {"level": 2},
        {"right": 2},
        {"right": 0},
        {"chance": 1 << 40},
        {"length": 1 << 61},
        {"length": -1},
    ],
)
def test_counts_that_cannot_be_are_refused(change: dict[str, int]) -> None:
    """One sample of class 0, predicted as such: a cell, and a score for each class."""
    good = {"length": 1, "cell": 0, "count": 1, "place": 2 * BINS + 8, "level": 1, "right": 1, "chance": 1 << 24}

    def message(**values: int) -> list[int]:
        v = good | values
        calibration = [0] * (LEVELS - 1) + [v["level"]] + [0] * (LEVELS - 1) + [v["right"]] + [0] * (LEVELS - 1)
        return [v["length"], 2, v["cell"], v["count"], 1, v["place"] - 1, 1, 1, *calibration, v["chance"]]

    assert sent(*message()).samples == 1
    with pytest.raises(ValueError, match=r"count|place"):
        sent(*message(**change))


@pytest.mark.parametrize("text", ["", "?", "AAAA", base64.b64encode(zlib.compress(bytes(10**7))).decode()])
def test_text_that_is_not_counts_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"counts|base64|padding|encoded"):
        from_text(text, 2)


def test_the_loss_is_that_of_cross_entropy_bit_for_bit() -> None:
    logits, y = drawn(7, 200, 10)
    assert score_of(logits, y, 10).loss == float(nn.functional.cross_entropy(logits, y, reduction="sum"))
    assert math.isfinite(score_of(logits, y, 10).loss)
