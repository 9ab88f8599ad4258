"""Means over updates, and warnings about runs that a method is not meant for."""

import pytest
import torch

import fedskew
from fedskew.core.method import Method, Update, mean_of
from fedskew.core.tensors import Tensors
from fedskew.core.training import Training
from fedskew.methods import REGISTRY


def test_a_mean_is_by_weight_unless_it_is_to_be_uniform() -> None:
    """(1 * 2 + 3 * 6) / 4 = 5; (2 + 6) / 2 = 4. A group that is not asked for is left out."""
    updates = [
        Update({"parameters": Tensors(w=torch.tensor(w)), "other": Tensors(v=torch.tensor(w))}, weight)
        for w, weight in ((2.0, 1.0), (6.0, 3.0))
    ]
    assert mean_of(updates) == {"parameters": {"w": torch.tensor(5.0)}}
    assert mean_of(updates, uniform=True) == {"parameters": {"w": torch.tensor(4.0)}}
    assert mean_of(updates, groups=["other"]) == {"other": {"v": torch.tensor(5.0)}}


@pytest.mark.parametrize(
    ("method", "training", "share", "words"),
    [
        ("feddyn", Training(momentum=0.9), 1.0, "FedDyn is meant for SGD without momentum"),
        ("feddc", Training(momentum=0.1), 1.0, "FedDC is meant for SGD without momentum"),
        ("scaffold", Training(optimiser="adam"), 1.0, "SCAFFOLD is meant for SGD without momentum"),
        ("scaffold", Training(), 0.1, ""),
        ("fednova", Training(momentum=0.9), 1.0, ""),
        ("fednova", Training(optimiser="adam"), 1.0, "FedNova is meant for SGD, with or without momentum"),
        ("fedper", Training(momentum=0.9), 0.5, "FedPer is meant for all clients in every round"),
        ("fedper", Training(momentum=0.9), 1.0, ""),
        ("fedavg", Training(optimiser="adam", momentum=0.9), 0.1, ""),
    ],
)
def test_a_method_warns_of_runs_it_is_not_meant_for(method: str, training: Training, share: float, words: str) -> None:
    warning = REGISTRY[method]().warning(training, share)
    assert warning.startswith(words)
    assert bool(warning) == bool(words)
    assert "\n" not in warning


@pytest.mark.parametrize("kind", REGISTRY.values(), ids=REGISTRY)
def test_no_method_warns_of_the_default_run(kind: type[Method]) -> None:
    assert kind().warning(fedskew.Experiment().training, 1.0) == ""
