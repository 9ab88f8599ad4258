"""FedALA: the mixture of the global and the own model, against the authors' figures, and what a client keeps."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from fedskew.core.net import Net
from fedskew.core.tensors import Tensors
from fedskew.core.training import Training
from fedskew.federation.make_world import world_from_tensors
from fedskew.federation.world import World
from fedskew.methods.fedala import FedALA
from helpers.nets import state_of
from toys import digits, rounds

X = torch.tensor([[1.0, 2.0], [0.0, -1.0], [2.0, 0.5], [-1.0, 1.0]])
Y = torch.tensor([0, 1, 1, 0])


def model(scale: float) -> Tensors:
    return Tensors(
        {
            "body.weight": torch.tensor([[1.0, 0.5], [-0.5, 1.0]]) * scale,
            "body.bias": torch.tensor([0.1, -0.1]),
            "head.weight": torch.tensor([[0.3, -0.2], [0.4, 0.1]]) * scale,
            "head.bias": torch.tensor([0.0, 0.2]) * scale,
        }
    )


def two_linears() -> Net:
    return Net(nn.Linear(2, 2), nn.Linear(2, 2), 2)


def world(method: FedALA) -> World:
    training = Training(lr=0.1, batch_size=2)
    return world_from_tensors(method, training, partial(two_linears), X, Y, [np.arange(4)], classes=2, rounds=3)


def test_the_weights_agree_with_the_authors_code() -> None:
    """Their module with the same inputs, all samples, batch 2: eleven passes the first time, then one."""
    method = FedALA(share=1.0)
    site = world(method).site(0, 1, "train")
    first = method.combine(site, {"parameters": model(1.0)}, {"own": model(3.0)})
    assert_close(first["head.weight"], torch.tensor([[0.6838822, 1.0], [0.1946182, 1.0]]))
    assert_close(first["head.bias"], torch.tensor([1.0, 0.9901675]))
    mixed = site.parameters()
    assert_close(mixed["body.weight"], model(1.0)["body.weight"])  # lower layers are the global model's
    assert_close(mixed["head.weight"], torch.tensor([[0.4896707, -0.2], [1.0443054, 0.1]]))

    second = method.combine(site, {"parameters": model(0.5)}, {"own": model(2.0), "weights": first})
    assert_close(second["head.weight"], torch.tensor([[0.6439198, 1.0], [0.2479014, 1.0]]))
    assert_close(site.parameters()["head.weight"], torch.tensor([[0.3102361, -0.1], [0.6512592, 0.05]]))


def test_p_counts_the_last_parameters() -> None:
    method = FedALA(p=1, share=1.0)
    site = world(method).site(0, 1, "train")
    weights = method.combine(site, {"parameters": model(1.0)}, {"own": model(3.0)})
    assert weights.keys() == {"head.bias"}
    assert_close(site.parameters()["head.weight"], model(1.0)["head.weight"])


def test_share_is_a_run_of_neighbouring_samples() -> None:
    method = FedALA(share=0.5)
    site = world(method).site(0, 1, "train")
    starts = {tuple(method.random_run(site).tolist()) for _ in range(50)}
    assert starts == {(0, 1), (1, 2), (2, 3)}


@pytest.mark.parametrize(
    ("losses", "first", "done"),
    [([1.0], False, True), ([1.0] * 10, True, False), ([1.0] * 11, True, True), ([0.0, 1.0] * 6, True, False)],
)
def test_weights_are_learned_until_the_loss_is_steady_the_first_time(
    losses: list[float], first: bool, done: bool
) -> None:
    assert FedALA.finished(losses, first=first) is done


def test_it_ends_after_sixty_passes_at_the_latest() -> None:
    assert not FedALA.finished([0.0, 1.0] * 29, first=True)
    assert FedALA.finished([0.0, 1.0] * 30, first=True)


def test_the_first_round_starts_from_the_global_model_and_keeps_the_trained_one() -> None:
    here = digits(FedALA())
    _, simulation = rounds(here, 1, cohorts=[[0]])
    kept = state_of(simulation, 0)
    assert kept.keys() == {"own"}
    _, simulation = rounds(here, 2, cohorts=[[0], [0]])
    assert state_of(simulation, 0).keys() == {"own", "weights"}


def test_evaluation_uses_the_combined_model_and_leaves_the_state() -> None:
    here = digits(FedALA())
    records, simulation = rounds(here, 1)
    state, broadcast = state_of(simulation, 0), here.method.broadcast(records[-1].server)
    personal = here.method.personalise(here.site(0, 1, "evaluate"), broadcast, state)["parameters"]
    for name, t in personal.items():
        if name.startswith("body."):
            assert torch.equal(t, broadcast["parameters"][name])
    low = torch.minimum(state["own"]["head.weight"], broadcast["parameters"]["head.weight"]) - 1e-6
    high = torch.maximum(state["own"]["head.weight"], broadcast["parameters"]["head.weight"]) + 1e-6
    assert ((personal["head.weight"] >= low) & (personal["head.weight"] <= high)).all()
    assert not torch.equal(personal["head.weight"], broadcast["parameters"]["head.weight"])
