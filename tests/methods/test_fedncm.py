"""FedNCM: class means of all clients' features, whichever clients send them and when."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from fedskew.core.settings import UsageError
from fedskew.methods.fedncm import FedNCM, nearest_mean_head
from helpers.nets import received, two_layers
from toys import digits, rounds, same

TOTAL, COUNT = tensor([[6.0, 8.0], [0.0, 2.0], [0.0, 0.0]]), tensor([2.0, 1.0, 0.0])  # means (3, 4) and (0, 2)


def test_the_head_has_normalised_means() -> None:
    weight, bias = nearest_mean_head(TOTAL, COUNT, "cosine")
    assert_close(weight, tensor([[0.6, 0.8], [0.0, 1.0], [0.0, 0.0]]))
    assert_close(bias, tensor([0.0, 0.0, -10000.0]))


def test_euclidean_logits_order_as_distances() -> None:
    """2 z mu - |mu|^2 = |z|^2 - |z - mu|^2; z = (1, 2) is 2.83 from the first mean and 1 from the second."""
    weight, bias = nearest_mean_head(TOTAL, COUNT, "euclidean")
    z = tensor([1.0, 2.0])
    assert_close((weight @ z + bias)[:2], tensor([5.0 - 8.0, 5.0 - 1.0]))


def test_cohorts_and_repetitions_do_not_change_the_sums() -> None:
    whole, _ = rounds(digits(FedNCM()), 1)
    parts, _ = rounds(digits(FedNCM()), 4, cohorts=[[0, 1], [1, 2], [3], [0, 4]])
    assert torch.equal(whole[-1].server["class_sums"]["count"], parts[-1].server["class_sums"]["count"])
    assert_close(whole[-1].server["class_sums"]["total"], parts[-1].server["class_sums"]["total"])


def test_the_sums_are_those_of_the_pooled_samples() -> None:
    world = digits(FedNCM())
    records, _ = rounds(world, 1)
    site = replace(world.site(0, 0, "train"), data=world.pool(world.train.values))
    site.load()
    z, y = site.infer(site.net.body).double(), site.data.labels
    for c in range(10):
        assert_close(records[0].server["class_sums"]["total"][c], z[y == c].sum(0))


def test_the_body_does_not_change_and_the_model_is_better_than_chance() -> None:
    world = digits(FedNCM())
    records, simulation = rounds(world, 1)
    start, end = (p["parameters"].split("head.")[0] for p in (received(world), records[0].server))
    assert same({"b": start}, {"b": end})
    metrics = simulation.evaluate(0, world.method.broadcast(records[0].server))
    assert metrics.global_ is not None
    assert metrics.global_.accuracy > 0.6


def test_a_class_that_no_client_has_is_never_predicted() -> None:
    weight, bias = nearest_mean_head(TOTAL, COUNT, "cosine")
    z = -torch.ones(5, 2)  # both known classes have negative logits
    assert (z @ weight.T + bias).argmax(1).max() < 2


def test_a_head_of_two_layers_is_refused_in_a_sentence() -> None:
    with pytest.raises(UsageError, match="one linear layer"):
        received(replace(digits(FedNCM()), make_net=partial(two_layers, True)))
