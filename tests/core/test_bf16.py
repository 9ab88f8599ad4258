"""Training with precision = "bf16": what computes in bfloat16, and what must not."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedskew
from fedskew.core.fast.bf16 import SLOW, bf16_body, bf16_warning
from fedskew.core.fit import fit
from fedskew.core.settings import UsageError
from fedskew.core.training import Training
from fedskew.federation.loop import run
from fedskew.federation.simulate.simulation import Simulation
from fedskew.federation.wire import digest
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.scaffold import SCAFFOLD
from fedskew.models import build
from toys import digits


class Watched(nn.Module):
    """Notes the types that go through it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(4, 4), list[torch.dtype]()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.seen.append(y.dtype)
        return y


def test_the_body_computes_in_bfloat16_and_gives_float32_to_the_head_and_the_loss() -> None:
    net = fedskew.core.net.Net(Watched(), nn.Linear(4, 3), features=4)
    x = torch.randn(5, 4)
    with bf16_body(net, "cpu"):
        z = net.body(x)
        logits = net(x)
    assert net.body.seen == [torch.bfloat16] * 2
    assert z.dtype == logits.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    net.body(x)
    assert net.body.seen[-1] == torch.float32  # only while it lasts
    assert not net.body._forward_hooks
    assert not net.body._forward_pre_hooks


def test_an_error_in_the_body_does_not_leave_autocast_switched_on() -> None:
    net = fedskew.core.net.Net(Watched(), nn.Linear(4, 3), features=4)
    with pytest.raises(RuntimeError), bf16_body(net, "cpu"):
        net(torch.randn(5, 7))
    assert not torch.is_autocast_enabled("cpu")


NETS: list[tuple[str, dict[str, Any]]] = [
    ("mlp", {"hidden": 16}),
    ("simple-cnn", {}),
    ("cnn", {"channels": "4-40", "hidden": 16}),
    ("cnn4", {"width": 4, "track": True}),
    ("cnn4", {"width": 4, "norm": "group"}),
    ("resnet8", {}),
]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("name", "options"), NETS)
def test_gradients_are_float32_and_near_those_of_float32(name: str, options: dict[str, Any], fast: bool) -> None:
    """bfloat16 has 8 bits: the direction must agree, single entries need not."""
    torch.manual_seed(0)
    net = build(name, (1, 28, 28), 10, seed=0, fast=fast, **options)
    x, y = torch.randn(20, 1, 28, 28), torch.arange(20) % 10
    grads = []
    for half in (False, True):
        twin = copy.deepcopy(net)
        with bf16_body(twin, "cpu" if half else "meta") if half else torch.enable_grad():
            nn.functional.cross_entropy(twin(x), y).backward()
        grads.append(torch.cat([p.grad.flatten() for p in twin.parameters()]))  # type: ignore[union-attr]
        assert all(t.dtype != torch.bfloat16 for t in twin.state_dict().values())
    assert grads[1].dtype == torch.float32
    assert not torch.equal(*grads)
    assert torch.cosine_similarity(grads[0], grads[1], dim=0) > 0.97


def test_the_fast_layers_do_not_fail_under_a_users_own_autocast() -> None:
    net = build("simple-cnn", (3, 32, 32), 10, seed=0)
    for batch in (2, 40):  # each of the ways to convolve
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(torch.randn(batch, 3, 32, 32)).float().square().mean()
        loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())


def test_batch_norm_statistics_are_those_of_float32_up_to_the_rounding_of_its_inputs() -> None:
    world = digits(FedAvg(), model="resnet8", training=Training(steps=1, batch_size=16))
    statistics = []
    for precision in ("float32", "bf16"):
        site = world.site(0, 0, "train")
        site.training = replace(site.training, precision=precision)
        site.load()
        fit(site, site.loss)
        statistics.append(site.buffers())
    for name, exact in statistics[0].items():
        assert statistics[1][name].dtype == exact.dtype
        assert torch.allclose(statistics[1][name].double(), exact.double(), rtol=0.05, atol=0.02), name


@pytest.mark.slow
@pytest.mark.usefixtures("quick_workers")
@pytest.mark.parametrize("method", [FedAvg(), SCAFFOLD()])
def test_the_bits_are_the_same_on_one_and_two_workers(method: fedskew.Method) -> None:
    found = set()
    for workers in (1, 2):
        world = digits(
            method, model="cnn", training=Training(batch_size=16, precision="bf16"), channels="4-8", hidden=8
        )
        with Simulation(world, workers=workers) as simulation:
            *_, record = run(method, simulation, simulation.world.server_site, 2, lambda round: [0, 1, 3])
            found.add((digest(record.server), str(record.metrics)))
    assert len(found) == 1


def test_it_is_part_of_the_experiment_and_float32_is_left_out_of_it() -> None:
    plain, half = fedskew.Experiment(), fedskew.Experiment(training=Training(precision="bf16"))
    assert "precision" not in plain.to_toml()
    assert half.as_dict()["training"]["precision"] == "bf16"
    assert fedskew.experiment.config.from_dict(half.as_dict()) == half != plain


@pytest.mark.parametrize("given", ["fp16", "", 16, None])
def test_a_nonsense_precision_is_refused_in_one_sentence(given: Any) -> None:
    with pytest.raises(UsageError, match="precision") as caught:
        fedskew.Experiment(training=Training(precision=given))
    assert str(caught.value).count("\n") == 0


def test_a_cpu_without_bfloat16_units_is_warned_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    units = {"avx512_bf16": False, "amx_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: units, raising=False)
    assert bf16_warning("bf16", "cpu") == SLOW
    assert bf16_warning("float32", "cpu") == bf16_warning("bf16", "cuda") == ""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    assert bf16_warning("bf16", "cpu") == ""
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # as in torch 2.6
    assert bf16_warning("bf16", "cpu") == ""
