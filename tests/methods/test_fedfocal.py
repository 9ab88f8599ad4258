"""Fed-Focal: the loss on numbers, where it becomes the cross entropy, and that no logit breaks it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, tensor
from torch.nn.functional import cross_entropy, log_softmax
from torch.testing import assert_close

from fedskew.methods.fedavg import FedAvg
from fedskew.methods.fedfocal import FedFocal, focal
from toys import digits, rounds, same, toy_q, w_of

SEVEN_TENTHS, Y = tensor([[0.7, 0.3]], dtype=torch.float64).log(), tensor([0])


@pytest.mark.parametrize(
    ("gamma", "alpha", "value"), [(2.0, 1.0, 0.03210074495), (2.0, 0.25, 0.008025186239), (0.0, 1.0, 0.3566749439)]
)
def test_the_loss_on_numbers(gamma: float, alpha: float, value: float) -> None:
    """p = .7: .3^2 (-log .7) = .09 * .3566749439."""
    assert focal(SEVEN_TENTHS, Y, gamma, alpha).item() == pytest.approx(value, abs=1e-10)


def batch() -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    return torch.randn(8, 5, generator=rng, dtype=torch.float64).requires_grad_(), torch.arange(8) % 5


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0, 5.0])
def test_it_is_the_batch_mean_of_the_formula_in_value_and_gradient(gamma: float) -> None:
    logits, y = batch()
    log_p = log_softmax(logits, 1).gather(1, y[:, None])
    wanted = (-0.25 * (1 - log_p.exp()) ** gamma * log_p).mean()
    given = focal(logits, y, gamma, 0.25)
    assert_close(given, wanted)
    assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (given, wanted)))


def test_with_gamma_0_it_is_alpha_times_the_cross_entropy() -> None:
    logits, y = batch()
    assert_close(focal(logits, y, 0.0, 0.25), 0.25 * cross_entropy(logits, y))


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("size", [30.0, 1000.0])
def test_certain_samples_have_finite_values_and_gradients(gamma: float, size: float) -> None:
    """p_y rounds to 1, then to 0: the loss is 0, then the gap in logits; gradients are 0 and (-1, 1) / 1."""
    for y, value, gradient in ((0, 0.0, (0.0, 0.0)), (1, size, (1.0, -1.0))):
        logits = tensor([[size, 0.0]], requires_grad=True)
        loss = focal(logits, tensor([y]), gamma, 1.0)
        loss.backward()  # type: ignore[no-untyped-call]
        assert loss.item() == pytest.approx(value, abs=1e-4)
        assert logits.grad is not None
        assert logits.grad[0].tolist() == pytest.approx(gradient, abs=1e-3)


def test_easy_samples_weigh_less() -> None:
    """gamma 2: at p = .9 a hundredth of the cross entropy, at p = .1 still .81 of it."""
    for p, share in ((0.9, 0.01), (0.1, 0.81)):
        assert focal(tensor([[p, 1 - p]]).double().log(), Y, 2.0, 1.0).item() == pytest.approx(-share * math.log(p))


@pytest.mark.parametrize(("gamma", "alpha"), [(2.0, 1.0), (1.5, 0.5)])
def test_clients_train_with_it_and_the_server_averages_as_fedavg(gamma: float, alpha: float) -> None:
    method = FedFocal(gamma=gamma, alpha=alpha)
    world = digits(method)
    records, _ = rounds(world, 1, cohorts=[[0, 3]])
    plain, _ = rounds(digits(FedAvg()), 1, cohorts=[[0, 3]])
    assert not same(records[0].server, plain[0].server)
    assert records[0].bytes_up == plain[0].bytes_up
    site = world.site(0, 1, "train")
    site.load()
    x, y = site.data.take(torch.arange(16))
    assert_close(method.objective(site, records[0].server, {})(site.net, x, y), focal(site.net(x), y, gamma, alpha))


def test_alpha_alone_changes_the_loss() -> None:
    """alpha 2 is FedAvg at twice the learning rate, up to rounding."""
    ours, _ = rounds(digits(FedFocal(gamma=0.0, alpha=2.0)), 1)
    world = digits(FedAvg())
    world.training = type(world.training)(lr=0.2, batch_size=16)
    plain, _ = rounds(world, 1)
    assert_close(dict(ours[0].server["parameters"]), dict(plain[0].server["parameters"]), rtol=1e-3, atol=1e-5)


def test_with_gamma_0_and_alpha_1_it_is_fedavg_bit_for_bit() -> None:
    ours, _ = rounds(digits(FedFocal(gamma=0.0, alpha=1.0)), 3, cohorts=[[0, 1], [1, 2, 3], [0, 4]])
    plain, _ = rounds(digits(FedAvg()), 3, cohorts=[[0, 1], [1, 2, 3], [0, 4]])
    assert same(ours[-1].server, plain[-1].server)
    records, _ = rounds(toy_q(FedFocal(gamma=0.0)), 2)
    assert [w_of(r) for r in records] == pytest.approx([-0.335, -0.52595], abs=1e-12)
