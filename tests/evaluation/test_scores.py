import math

import numpy as np
import torch
from torch import nn

from fedskew.core.samples import Data
from fedskew.evaluation.figures import headline
from fedskew.evaluation.metrics import ClientMetrics, Metrics, ModelMetrics, Population
from fedskew.evaluation.scores import ClientScore, Score, score, score_of, thirds
from fedskew.evaluation.summary import Summary, summarise


def of(correct: int, total: int, loss: float = 0.0) -> Score:
    return Score((correct,), (total,), loss)


def over_clients(scores: list[Score]) -> ClientMetrics | None:
    """The metrics of clients with these scores of their own models."""
    clients = [ClientScore(i, None, one, fallback=False) for i, one in enumerate(scores)]
    population = summarise(None, clients, frozenset(), False, {}).clients
    return None if population is None else population.personal


def test_mean_is_over_clients_and_weighted_over_samples() -> None:
    """Accuracies .9 of 10 and .5 of 90 samples: mean .70, weighted (9 + 45) / 100 = .54."""
    figures = over_clients([of(9, 10), of(45, 90)])
    assert figures is not None
    assert math.isclose(figures.mean, 0.70)
    assert math.isclose(figures.weighted, 0.54)
    assert math.isclose(figures.std, 0.2)


def test_clients_without_test_samples_do_not_count() -> None:
    figures = over_clients([of(0, 0), of(1, 2)])
    assert figures is not None
    assert (figures.clients, figures.mean) == (1, 0.5)
    assert over_clients([of(0, 0)]) is None


def test_the_worst_tenth_is_rounded_up() -> None:
    """Of 11 clients the worst tenth is two: (.0 + .1) / 2."""
    figures = over_clients([of(i, 10) for i in range(11)])
    assert figures is not None
    assert math.isclose(figures.worst_decile, 0.05)


def test_per_class_accuracy_is_none_where_a_class_has_no_sample() -> None:
    s = Score((1, 0, 3), (2, 0, 3), 0.0)
    assert s.metrics().per_class == [0.5, None, 1.0]
    assert s.accuracy == 0.8


class Fixed(nn.Module):
    """Says class 1 for the first input value above zero, else class 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([-x[:, 0], x[:, 0]], dim=1)


def test_score_counts_by_class_and_sums_the_loss() -> None:
    """Logits (-x, x) for x = 2, -2, 1 with labels 1, 1, 0: one of two right in class 1, none of one in class 0."""
    x = torch.tensor([[2.0], [-2.0], [1.0], [9.0]])
    data = Data(x, torch.tensor([1, 1, 0, 0]), torch.tensor([0, 1, 2]))
    s = score(Fixed(), data, 2)
    assert (s.correct, s.total) == ((0, 1), (1, 2))
    expected = np.log1p(np.exp(-4.0)) + np.log1p(np.exp(4.0)) + np.log1p(np.exp(2.0))
    assert math.isclose(s.loss, expected, rel_tol=1e-6)


def test_batch_statistics_ignore_and_leave_the_running_ones() -> None:
    net = nn.Sequential(nn.BatchNorm1d(1, affine=False), Fixed())
    data = Data(torch.tensor([[99.0], [101.0]]), torch.tensor([0, 1]), torch.arange(2))
    assert score(net, data, 2).accuracy == 0.5  # less a running mean of 0, both are positive: class 1
    assert score(net, data, 2, batch_statistics=True).accuracy == 1.0
    assert net[0].running_mean.item() == 0.0
    assert net[0].num_batches_tracked.item() == 0
    assert net[0].track_running_stats


def test_a_single_sample_can_be_scored_without_statistics() -> None:
    net = nn.Sequential(nn.BatchNorm1d(1, track_running_stats=False), Fixed())
    data = Data(torch.tensor([[3.0]]), torch.tensor([0]), torch.arange(1))
    assert score(net, data, 2).samples == 1


def test_summary_has_no_global_words_for_a_method_without_a_global_model() -> None:
    scores = [ClientScore(0, None, of(1, 2), fallback=False), ClientScore(1, None, of(2, 2), fallback=True)]
    metrics = summarise(None, scores, frozenset(), False, {})
    assert metrics.global_ is None
    assert metrics.clients.global_ is None
    assert metrics.clients.personal.mean == 0.75
    assert metrics.clients.never_trained == 1
    assert metrics.new is None


def test_a_confusion_table_of_very_many_classes_is_not_kept() -> None:
    """With 3000 classes it made a result file of 200 MB."""
    for classes, kept in ((300, True), (301, False)):
        summary = Summary()
        summary.add_test(score_of(torch.eye(classes), torch.arange(classes), classes))
        assert bool(summary.confusion()) == kept
        assert summary.metrics(False, {}).global_.accuracy == 1.0  # type: ignore[union-attr]


def test_summary_keeps_newcomers_apart() -> None:
    scores = [ClientScore(0, of(1, 1), of(1, 1), False), ClientScore(1, of(0, 1), of(0, 1), True)]
    metrics = summarise(of(1, 2), scores, frozenset({1}), True, {})
    assert metrics.clients.global_.mean == 1.0
    assert metrics.new.global_.mean == 0.0
    assert metrics.clients.sampled


def test_clients_that_never_trained_are_counted_in_their_own_group() -> None:
    """Of clients 0 and 1 only the latter has not trained; the newcomers 2 and 3 never do."""
    one = of(1, 1)
    scores = [ClientScore(client, one, one, fallback=client > 0) for client in range(4)]
    metrics = summarise(one, scores, frozenset({2, 3}), False, {})
    assert (metrics.clients.never_trained, metrics.new.never_trained) == (1, 2)


def test_a_client_without_test_samples_has_no_row() -> None:
    scores = [ClientScore(0, None, of(0, 0), False), ClientScore(7, None, of(3, 4), False)]
    summary = Summary()
    for one in scores:
        summary.add(one)
    assert {name: row.personal.accuracy for name, row in summary.rows().items()} == {"7": 0.75}


def test_the_headline_is_the_global_model_s_accuracy_then_its_mean_over_clients_then_the_personal_mean() -> None:
    shared, personal = over_clients([of(3, 10)]), over_clients([of(9, 10)])
    model = ModelMetrics(accuracy=0.5, loss=0.0, per_class=[])
    both = Population(global_=shared, personal=personal, never_trained=0, sampled=False)
    alone = Population(global_=None, personal=personal, never_trained=0, sampled=False)
    assert headline(Metrics(global_=model, clients=both)) == 0.5
    assert headline(Metrics(clients=both)) == 0.3
    assert headline(Metrics(clients=alone)) == 0.9
    assert headline(Metrics()) is None
    assert headline(None) is None


def test_a_largest_class_of_exactly_twice_the_smallest_counts_as_a_long_tail() -> None:
    """6 = 2 * 3 is a tail, 5 < 2 * 3 is not."""
    assert thirds([6, 4, 3]) == {"head": [0], "middle": [1], "tail": [2]}
    assert thirds([5, 4, 3]) == {}
