"""Central: the training data of all clients at one client."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedskew.core.settings import UsageError
from fedskew.experiment.assemble import assemble
from fedskew.experiment.config import Experiment, Holdout
from fedskew.experiment.run import Run
from fedskew.methods.central import Central
from fedskew.methods.fedavg import FedAvg

SPLIT = "dirichlet:alpha=0.3,clients=4,min=5"


def test_one_client_holds_all_training_samples_and_all_keep_their_test_parts() -> None:
    federated = assemble(Experiment(FedAvg(), split=SPLIT)).world
    pooled = assemble(Experiment(Central(), split=SPLIT, clients_per_round=2))
    every = torch.cat([federated.train[c] for c in range(4)])
    assert torch.equal(pooled.world.train[0], every)
    assert [len(pooled.world.train[c]) for c in range(4)] == [len(every), 0, 0, 0]
    assert all(torch.equal(pooled.world.test[c], federated.test[c]) for c in range(4))
    assert (pooled.members, pooled.cohort(0), pooled.quorum) == ((0,), [0], 1)


def test_clients_that_never_train_are_not_pooled() -> None:
    settings = Experiment(FedAvg(), split=SPLIT, holdout=Holdout(newcomers=2))
    members = assemble(settings).members
    pooled = assemble(replace(settings, method=Central())).world
    federated = assemble(settings).world
    assert torch.equal(pooled.train[0], torch.cat([federated.train[c] for c in members]))


def test_central_training_is_that_of_a_federation_of_one() -> None:
    """With all samples of one client in one order, FedAvg with a single client takes the same steps."""
    central = Run(Experiment(Central(), split="iid:clients=1", rounds=2))
    alone = Run(Experiment(FedAvg(), split="iid:clients=1", rounds=2))
    for run in (central, alone):
        list(run)
    assert central.result.model_digest == alone.result.model_digest


def test_evaluates_the_one_model_on_every_client() -> None:
    run = Run(Experiment(Central(), split=SPLIT, rounds=1))
    (record,) = run
    assert record.metrics is not None
    assert record.metrics.clients.personal.clients == 4
    assert record.metrics.clients.personal == record.metrics.clients.global_


def test_clients_that_see_other_inputs_cannot_be_pooled() -> None:
    with pytest.raises(UsageError, match="central cannot pool clients with feature skew"):
        assemble(Experiment(Central(), split=f"{SPLIT}+noise:level=0.5"))
