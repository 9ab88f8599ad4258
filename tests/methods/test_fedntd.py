"""FedNTD: the loss on numbers, what it leaves alone, and its teacher."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax
from torch.testing import assert_close

from fedskew.core.training import Training
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.fedntd import FedNTD, not_true
from helpers.nets import normed, state_of
from toys import digits, rounds, same, toy_q, w_of

L, G, Y = tensor([[2.0, 1.0, 0.0]]).double(), tensor([[0.0, 1.0, 3.0]]).double(), tensor([0])


@pytest.mark.parametrize(("tau", "term", "total"), [(1.0, 0.8287249104, 1.236330875), (3.0, 1.080226709, 1.487832674)])
def test_the_loss_on_numbers(tau: float, term: float, total: float) -> None:
    """Without class 0: l (1, 0), g (1, 3). CE(l, 0) = .4076059644. With tau 3: 9 KL of a third of the logits."""
    assert not_true(L, G, Y, tau).item() == pytest.approx(term, abs=1e-9)
    assert (cross_entropy(L, Y) + not_true(L, G, Y, tau)).item() == pytest.approx(total, abs=1e-9)


def normal(seed: int, classes: int = 5) -> torch.Tensor:
    return torch.randn(6, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_it_is_kl_of_the_softmax_over_the_other_classes_teacher_first_batch_mean() -> None:
    l, g, y = normal(0), normal(1), torch.arange(6) % 5
    each = []
    for i in range(6):
        others = [c for c in range(5) if c != y[i]]
        p, log_q = softmax(g[i, others] / 2, 0), log_softmax(l[i, others] / 2, 0)
        each.append(4 * kl_div(log_q, p, reduction="sum"))
    assert_close(not_true(l, g, y, 2.0), torch.stack(each).mean())


def test_the_true_class_plays_no_part_on_either_side() -> None:
    l, g, y = normal(0).requires_grad_(), normal(1), torch.arange(6) % 5
    own = torch.nn.functional.one_hot(y, 5).double()
    loss = not_true(l, g, y, 1.0)
    (gradient,) = torch.autograd.grad(loss, l)
    assert not gradient[own.bool()].any()
    assert_close(gradient.sum(1), torch.zeros(6).double())
    assert_close(not_true(l + 7 * own, g - 9 * own, y, 1.0), loss)


def test_the_teacher_gets_no_gradient_and_agreement_costs_nothing() -> None:
    l, g, y = normal(0).requires_grad_(), normal(1).requires_grad_(), torch.arange(6) % 5
    not_true(l, g, y, 1.0).backward()  # type: ignore[no-untyped-call]
    assert g.grad is None
    assert not_true(g + 3, g, y, 2.0).item() == pytest.approx(0.0, abs=1e-12)


def test_with_two_classes_the_term_is_0() -> None:
    l, y = normal(0, 2).requires_grad_(), torch.arange(6) % 2
    loss = not_true(l, normal(1, 2), y, 1.0)
    assert loss.item() == 0
    assert not torch.autograd.grad(loss, l)[0].any()


@pytest.mark.parametrize("policy", ["aggregate", "local"])
def test_the_objective_has_the_model_received_as_teacher_in_evaluation_mode(policy: Any) -> None:
    """With batch norm; local: the teacher has the client's own statistics, as the client starts with them."""
    method = FedNTD(beta=0.7, tau=2.0)
    world = normed(method, training=Training(lr=0.1, batch_size=16, batch_norm=policy))
    records, simulation = rounds(world, 1)
    broadcast, state = method.broadcast(records[0].server), state_of(simulation, 1)
    assert ("buffers" in state) == (policy == "local")
    site = world.site(1, 1, "train")
    x, y = site.data.take(torch.arange(16))
    site.load(broadcast, state)
    with torch.no_grad():
        g = site.net.eval()(x)
    loss = method.objective(site, broadcast, state)
    site.load()
    l = site.net.train()(x)
    wanted = cross_entropy(l, y) + 0.7 * not_true(l, g, y, 2.0)
    assert_close(loss(site.net, x, y), wanted)
    assert_close(loss(site.net, x, y), wanted)  # the teacher has not moved


@pytest.mark.parametrize(("steps", "equal"), [(1, True), (2, False)])
def test_the_first_step_is_fedavg_s_because_student_and_teacher_agree(steps: int, equal: bool) -> None:
    training = Training(lr=0.1, batch_size=16, steps=steps)
    cohorts = [[0, 1], [2, 3]]
    ours, _ = rounds(digits(FedNTD(beta=5.0), training=training), 2, cohorts=cohorts)
    plain, _ = rounds(digits(FedAvg(), training=training), 2, cohorts=cohorts)
    gap = ours[-1].server["parameters"] - plain[-1].server["parameters"]
    assert (gap.dot(gap).sqrt() < 1e-5) == equal


def test_nothing_extra_travels_or_is_kept() -> None:
    ours, simulation = rounds(digits(FedNTD()), 2)
    plain, _ = rounds(digits(FedAvg()), 2)
    assert (ours[-1].bytes_up, ours[-1].bytes_down) == (plain[-1].bytes_up, plain[-1].bytes_down)
    assert state_of(simulation, 0) == {}


def test_a_larger_beta_keeps_more_of_what_the_server_knew_of_other_classes() -> None:
    records, _ = rounds(digits(FedAvg()), 2)
    broadcast = records[-1].server

    def forgotten(beta: float) -> float:
        world = digits(FedNTD(beta=beta), training=Training(lr=0.1, batch_size=16, epochs=3))
        update = world.train_client(1, 2, "train", broadcast, {}).update
        site = world.site(1, 2, "train")
        student, teacher = (site.infer(site.frozen(model)) for model in (update.payload, broadcast))
        return not_true(student, teacher, site.data.labels, 1.0).item()

    assert forgotten(10.0) < forgotten(1.0) < forgotten(0.0)


def test_without_its_term_it_is_fedavg_bit_for_bit() -> None:
    ours, _ = rounds(digits(FedNTD(beta=0.0)), 2)
    plain, _ = rounds(digits(FedAvg()), 2)
    assert same(ours[-1].server, plain[-1].server)


def test_without_its_term_it_is_fedavg_on_numbers() -> None:
    """Toy Q: -.335, -.52595."""
    records, _ = rounds(toy_q(FedNTD(beta=0.0)), 2)
    assert [w_of(r) for r in records] == pytest.approx([-0.335, -0.52595], abs=1e-12)
