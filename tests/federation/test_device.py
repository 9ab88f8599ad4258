"""Training on a GPU. These tests are skipped where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedskew.core.samples import to_device
from fedskew.core.tensors import Payload
from fedskew.core.training import Training
from fedskew.federation.loop import run
from fedskew.federation.simulate.simulation import Simulation
from fedskew.federation.world import World
from fedskew.methods import REGISTRY
from fedskew.methods.fedavg import FedAvg
from toys import digits

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")


def world_of(name: str, precision: str = "float32") -> World:
    kind = REGISTRY[name]
    split = ("public:per_class=4+" if kind.public else "") + "dirichlet:alpha=0.5,clients=4,min=5"
    training = Training(lr=0.1, batch_size=16, steps=1, precision=precision)  # type: ignore[arg-type]
    return digits(kind(**kind.quick), split=split, training=training, count=1)


def one_round(world: World, workers: int = 1) -> Payload:
    with Simulation(world, workers=workers) as simulation:
        *_, record = run(world.method, simulation, simulation.world.server_site, 1, lambda round: [0, 1, 2, 3])
    return record.server


def test_the_cpu_gets_tensors_as_they_are() -> None:
    x = torch.ones(3)
    assert to_device(x, "cpu") is x


def test_another_device_gets_processes_only_if_their_number_is_given() -> None:
    """Each process takes memory of the GPU. The device "meta" stands for one; nothing is computed on it."""
    world = replace(digits(FedAvg()), device="meta")
    assert Simulation(world, workers=None).pool is None
    assert Simulation(world, workers=1).pool is None


@needs_gpu
@pytest.mark.parametrize("name", REGISTRY)
def test_a_step_on_the_gpu_is_near_one_on_the_cpu_and_payloads_are_on_the_cpu(name: str) -> None:
    there = one_round(replace(world_of(name), device="cuda"))
    here = one_round(world_of(name))
    for group, tensors in there.items():
        assert all(t.device.type == "cpu" for t in tensors.values()), group
    for key, value in here.get("parameters", {}).items():
        assert torch.allclose(there["parameters"][key], value, atol=1e-2), key


@needs_gpu
def test_two_workers_share_one_gpu() -> None:
    alone, shared = (one_round(replace(world_of("fedavg"), device="cuda"), workers) for workers in (1, 2))
    assert all(torch.allclose(t, shared["parameters"][name], atol=1e-5) for name, t in alone["parameters"].items())


@needs_gpu
def test_bfloat16_trains_on_the_gpu() -> None:
    server = one_round(replace(world_of("fedavg", "bf16"), device="cuda"))
    assert all(t.dtype == torch.float32 and t.isfinite().all() for t in server["parameters"].values())


@needs_gpu
def test_samples_reach_the_gpu_unchanged() -> None:
    x = torch.arange(10_000.0)
    assert torch.equal(to_device(x, "cuda").cpu(), x)
