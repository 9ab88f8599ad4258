"""Attacks that `--fault` simulates, by hand, and what robust rules make of them."""

from __future__ import annotations

import pytest
import torch
from torch import tensor

import fedskew
from fedskew.core.method import Update
from fedskew.core.seeding import seeded
from fedskew.core.tensors import Payload, Tensors
from fedskew.experiment.config import from_dict
from fedskew.federation.robust import left_out, mean_left_out
from fedskew.federation.simulate.faults import Fault, attackers, colluding, parse_faults, spoiled

X: Payload = {"parameters": Tensors(w=tensor([1.0, 2.0]))}
PROTOTYPES = Tensors(mean=tensor([[4.0]]), count=tensor([3.0]))
HONEST = Update({"parameters": Tensors(w=tensor([1.5, 1.0])), "prototypes": PROTOTYPES}, 7.0)


@pytest.mark.parametrize(
    ("kind", "w", "mean"), [("signflip", [0.5, 3.0], -4.0), ("scale", [6.0, -8.0], 40.0), ("labels", [1.5, 1.0], 4.0)]
)
def test_the_change_is_turned_or_scaled_in_every_group(kind, w, mean) -> None:  # type: ignore[no-untyped-def]
    """From (1, 2) the client went by (.5, -1); prototypes are no change but start from 0. Counts and weights stay."""
    sent = spoiled(HONEST, Fault(kind), X, seeded(0))
    assert sent.payload["parameters"]["w"].tolist() == w
    assert sent.payload["prototypes"]["mean"].item() == mean
    assert sent.payload["prototypes"]["count"].item() == 3.0
    assert sent.weight == 7.0


def test_the_strength_can_be_given() -> None:
    assert spoiled(HONEST, Fault("scale", strength=2.0), X, seeded(0)).payload["parameters"]["w"].tolist() == [2.0, 0.0]


def test_noise_has_the_size_of_the_update_times_its_strength() -> None:
    zero: Payload = {"parameters": Tensors(w=torch.zeros(10_000))}
    own = Update({"parameters": Tensors(w=torch.full((10_000,), -0.2))}, 1.0)
    w = spoiled(own, Fault("noise", strength=3.0), zero, seeded(0)).payload["parameters"]["w"]
    assert float(w.std()) == pytest.approx(0.6, rel=0.05)
    assert abs(float(w.mean())) < 0.03


def test_a_little_is_enough_by_hand() -> None:
    """Attackers at 1 and 3: mean 2, deviation 1, so both send 2 - 1.5. A lone one sends its own."""
    own = [Update({"parameters": Tensors(w=tensor([value]))}, 1.0) for value in (1.0, 3.0)]
    assert [u.payload["parameters"]["w"].item() for u in colluding(own, Fault("alie"))] == [0.5, 0.5]
    assert colluding(own[:1], Fault("alie"))[0].payload["parameters"]["w"].item() == 1.0


def test_the_first_clients_attack_in_every_round() -> None:
    faults = parse_faults("signflip:first=2+nan:client=4")
    assert [attackers(faults, 0, range(5), round) for round in range(3)] == [{0, 1}] * 3


def run(fault: str, robust: dict[str, object] | None = None, workers: int = 1) -> fedskew.Run:
    values = {
        "method": "fedmr",
        "split": "sample:keep=600+iid:clients=7",
        "model": "mlp:hidden=16",
        "rounds": 4,
        "training": {"lr": 0.1},
        "trouble": {"fault": fault},
        "robust": robust or {},
    }
    made = fedskew.run(from_dict(values), workers=workers)
    list(made)
    return made


@pytest.mark.slow
@pytest.mark.usefixtures("quick_workers")
@pytest.mark.parametrize("kind", ["noise", "labels", "alie"])
def test_attacks_give_the_same_bits_on_any_number_of_workers(kind: str) -> None:
    one, two, none = run(f"{kind}:first=2"), run(f"{kind}:first=2", workers=2), run("")
    assert one.result is not None
    assert two.result is not None
    assert none.result is not None
    assert one.result.digest == two.result.digest != none.result.digest


def test_krum_keeps_the_model_that_noise_destroys_under_the_mean() -> None:
    attack = "noise:first=2,strength=100"
    plain, robust = run(attack), run(attack, {"rule": "krum", "attackers": 2})
    assert plain.result is not None
    assert robust.result is not None
    assert (robust.result.accuracy or 0) > (plain.result.accuracy or 0) + 0.15
    assert all(left_out(record.shares) == {0, 1} for record in robust.records)
    assert robust.result.left_out == pytest.approx(2 / 7)
    assert plain.result.left_out is None


def test_clients_left_out_are_those_used_by_less_than_half() -> None:
    assert mean_left_out([{0: 0.5, 1: 0.5, 2: 0.0}, {}, {0: 0.3, 1: 0.3, 2: 0.4}]) == pytest.approx(1 / 6)
    assert mean_left_out([{}]) is None
