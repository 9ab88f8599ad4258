"""What a run says of drift when asked: computed after the last round, so the run itself has the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedskew.core.tensors import Tensors
from fedskew.experiment.config import Evaluation, Experiment, Holdout
from fedskew.experiment.diagnostics import diagnose, drifted, eigenvalue_spread, head_distances, mean_distance
from fedskew.experiment.run import Run
from fedskew.federation.store import Store
from fedskew.methods import REGISTRY
from fedskew.methods.fedavg import FedAvg
from toys import digits, rounds

SMALL = Experiment(split="dirichlet:alpha=0.5,clients=4", model="mlp:hidden=16", rounds=2)
ASKED = Evaluation(diagnose=True)


def test_distances_of_heads_are_means_over_pairs() -> None:
    """Heads (0, 0), (3, 4), (0, 4): 5, 4 and 3 apart, 4 on average; the bodies do not count."""
    heads = [(0.0, 0.0), (3.0, 4.0), (0.0, 4.0)]
    models = [
        {"parameters": Tensors({"body.w": torch.tensor([9.0 * i]), "head.w": torch.tensor(head)})}
        for i, head in enumerate(heads)
    ]
    apart = head_distances(models)
    assert apart[0].tolist() == [0.0, 5.0, 4.0]
    assert mean_distance(apart) == pytest.approx(4.0)
    assert mean_distance(head_distances(models[:1])) is None
    assert mean_distance(head_distances([])) is None


def test_the_spread_of_eigenvalues_is_their_variation_around_the_mean() -> None:
    """Two features that move together: eigenvalues 2 and 0, each 1 from their mean; (1 + 1) / 3 samples.

    Two that do not: eigenvalues 1 and 1, so 0.
    """
    together = torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
    apart = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    assert eigenvalue_spread(together, torch.zeros(3, dtype=torch.int64)) == pytest.approx(2 / 3)
    assert eigenvalue_spread(apart, torch.zeros(4, dtype=torch.int64)) == pytest.approx(0, abs=1e-9)


def test_a_run_has_the_same_bits_with_and_without_diagnosis() -> None:
    plain, asked = Run(SMALL), Run(replace(SMALL, evaluation=ASKED))
    list(plain)
    list(asked)
    assert plain.result.digest == asked.result.digest
    assert plain.result.diagnostics is None
    found = asked.result.diagnostics
    assert found.clients == 4
    assert found.eigenvalue_spread > 0
    assert found.head_distance > 0


def test_a_frozen_head_does_not_drift_and_a_personal_one_does() -> None:
    """FedBABU's clients never train the head; FedPer's keep their own."""
    found: dict[str, Any] = {}
    for name in ("fedbabu", "fedper"):
        run = Run(replace(SMALL, method=REGISTRY[name](), evaluation=ASKED))
        list(run)
        found[name] = run.result.diagnostics
    assert found["fedbabu"].head_distance == 0
    assert found["fedper"].head_distance > 0.1
    assert found["fedper"].eigenvalue_spread is None  # no global model


def test_clients_drift_from_the_server_s_model_and_states_stay() -> None:
    world = digits(FedAvg())
    (*_, last), simulation = rounds(world, 2)
    before = dict(simulation.store.rounds)
    (first, *_) = drifted(world, last.server, simulation.store, [2])
    again = world.train_client(2, world.rounds - 1, "train", last.server, {}).update.payload["parameters"]
    assert all(torch.equal(first["parameters"][name], again[name]) for name in again)
    assert simulation.store.rounds == before


def test_without_a_test_set_there_is_no_spread() -> None:
    run = Run(replace(SMALL, evaluation=ASKED, holdout=Holdout(test=0.2, pool="all")))
    list(run)
    assert run.result.diagnostics.eigenvalue_spread is None
    world = digits(FedAvg())
    (*_, last), _ = rounds(world, 1)
    found = diagnose(world, last.server, Store(), [0])
    assert (found.head_distance, found.clients) == (None, 1)


def test_the_command_prints_the_diagnosis(fedskew: Any) -> None:
    few = ("--rounds", "1", "--model", "mlp:hidden=8", "--workers", "1")
    assert "distance of clients' heads" in fedskew("run", "--diagnose", *few).out
    assert "distance of clients' heads" not in fedskew("run", *few).out
    assert fedskew("run", "--diagnose", "--json", *few).json()["settings"]["evaluation"]["diagnose"] is True
