"""Ratio Loss: the ratios and the loss on numbers, the monitor by hand, when R counts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import tensor
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from fedskew.core.fit import fit
from fedskew.core.method import model_of
from fedskew.methods._shared.heads import last_linear
from fedskew.methods.ratioloss import RATIO, RatioLoss, ratios, weighted_cross_entropy
from helpers.public import arrived, server_site, small
from toys import rounds, same


def test_ratios_on_numbers() -> None:
    """Weight 0 is class 0's (.5 against .1), weight 1 class 1's (.4 against .1); .19 is over 80 % of .2: no class."""
    d = tensor([[0.5, -0.1, 0.2], [-0.1, 0.4, 0.19]])
    assert_close(ratios(d, 5000.0), tensor([5.0, 4.0]))


def test_changes_add_up_before_they_are_divided_and_others_are_averaged() -> None:
    """Class 0 owns weights 0 and 1: own .5 + .3, others the mean of (-.1, .2) and (.1, -.1): .05 + 0. R = 16."""
    d = tensor([[0.5, 0.3, 0.0], [-0.1, 0.1, 0.9], [0.2, -0.1, 0.1]])
    assert_close(ratios(d, 5000.0), tensor([16.0, 0.9 / 0.05, 10.0]))


def test_a_class_without_weights_has_10_and_none_has_more_than_the_cap() -> None:
    """Weight 0: the others' changes cancel to 1e-6; nothing moved at weight 1; class 2 owns nothing."""
    d = tensor([[1.0, 0.0, 0.0], [0.1, 0.0, 1.0], [-0.099998, 0.0, 0.0]]).double()
    assert ratios(d, 5000.0).tolist() == [5000.0, 10.0, 10.0]
    assert ratios(d, 20.0).tolist() == [20.0, 10.0, 10.0]
    assert ratios(torch.zeros(3, 4), 5000.0).tolist() == [10.0] * 3


def test_a_class_whose_changes_are_all_negative_owns_no_weight() -> None:
    """The largest change is the least negative one: others are larger in size."""
    assert ratios(tensor([[-0.1], [-0.5]]), 5000.0).tolist() == [10.0, 10.0]


def test_the_loss_on_numbers() -> None:
    """R = 5: weight 1.5, and -1.5 log .7 = .535012; the mean is over samples, not over weights."""
    x = tensor([[0.7, 0.3]]).log()
    weight = tensor([1.5, 1.0])
    assert float(weighted_cross_entropy(weight, lambda x: x, x, tensor([0]))) == pytest.approx(0.5350124159)
    both = weighted_cross_entropy(weight, lambda x: x, x.repeat(2, 1), tensor([0, 1]))
    assert float(both) == pytest.approx((0.5350124159 - math.log(0.3)) / 2)


def test_the_monitor_trains_a_copy_for_each_class_of_d0() -> None:
    """By hand: each class's four samples alone, the clients' settings, the change of the last layer's weight."""
    world, server, _ = arrived()
    model, site = model_of(server), server_site()
    found = RatioLoss().monitor(site, model)
    again, changes = server_site(), []
    assert last_linear(again.net) == "head"
    for c in range(10):
        own = replace(again, data=again.data.part((again.data.labels == c).nonzero().flatten()))
        assert len(own.data) == 4
        own.load(model)
        fit(own, cross_entropy_of)
        changes.append(own.parameters()["head.weight"] - model["parameters"]["head.weight"])
    assert_close(found, ratios(torch.stack(changes), 10.0))
    assert (found > 0).all()
    assert world.training.epochs == 1


def cross_entropy_of(net, x, y):  # type: ignore[no-untyped-def]
    return cross_entropy(net(x), y)


def test_the_first_round_is_fedavg_s_and_then_rare_answers_weigh_more() -> None:
    method, world = RatioLoss(), small(RatioLoss())
    start = method.init_server(world.server_site(0, "init"))
    site = world.site(0, 0, "train")
    assert method.objective(site, start, {}) is site.loss
    records, _ = rounds(world, 2)
    first, second = (r.server[RATIO]["weight"] for r in records)
    assert_close(first, 1 + 0.1 * method.monitor(world.server_site(0, "train"), model_of(start)))
    assert not torch.equal(first, second)
    x, y = site.data.take(torch.arange(12))
    site.load(records[0].server)
    loss = method.objective(site, method.broadcast(records[0].server), {})(site.net, x, y)
    wanted = (first[y] * cross_entropy(site.net(x), y, reduction="none")).mean()
    assert_close(loss, wanted)
    assert records[0].bytes_down[RATIO] == 5 * 4 * 10
    assert RATIO not in records[0].bytes_up


def test_a_scales_the_loss_without_a_monitor() -> None:
    records, _ = rounds(small(RatioLoss(a=2.0, b=0.0)), 1)
    assert records[0].server[RATIO]["weight"].tolist() == [2.0] * 10
    plain, _ = rounds(small(RatioLoss()), 1)
    assert same(model_of(records[0].server), model_of(plain[0].server))  # R comes with the second broadcast
