"""Faults on purpose: whatever one client does, the round is what it would have been without it."""

from typing import get_args

import pytest

from fedskew.core.files import sha256
from fedskew.core.settings import UsageError
from fedskew.federation.loop import run
from fedskew.federation.protocol import Record
from fedskew.federation.simulate.faults import KINDS, Attack, Fault, fault_at, parse_faults
from fedskew.federation.simulate.simulation import Simulation
from fedskew.federation.wire import digest
from fedskew.methods.scaffold import SCAFFOLD
from toys import digits

WORDS = {
    "drop": "dropped out",
    "straggle": "answered too late",
    "nan": "not finite",
    "inf": "not finite",
    "shape": "expected F32",
    "raise": "failed: RuntimeError",
    "die": "crashed its worker process twice",
}


def rounds(faults: str, cohorts: list[list[int]]) -> tuple[list[Record], Simulation]:
    world = digits(SCAFFOLD(), count=3)
    simulation = Simulation(world, faults=parse_faults(faults))
    return list(run(world.method, simulation, world.server_site, 3, lambda r: cohorts[r])), simulation


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in get_args(Attack)])
def test_a_faulty_client_is_named_and_nothing_else_is_lost(kind: str) -> None:
    """Server, every client's state (the faulty one's included: it stays as it was) and metrics, bit for bit."""
    everyone = [0, 1, 2, 3, 4]
    struck_run, one = rounds(f"{kind}:client=2,round=1", [everyone] * 3)
    without, other = rounds("", [everyone, [0, 1, 3, 4], everyone])
    assert WORDS[kind] in struck_run[1].lost[2]
    assert struck_run[1].trained == [0, 1, 3, 4]
    assert [digest(r.server) for r in struck_run] == [digest(r.server) for r in without]
    assert [sha256(one.store.get(c)) for c in everyone] == [sha256(other.store.get(c)) for c in everyone]
    assert struck_run[-1].metrics == without[-1].metrics


def test_faults_are_drawn_by_seed_client_and_round() -> None:
    fault = (Fault("drop", 0.3),)
    drawn = [fault_at(fault, 0, client, round) for client in range(50) for round in range(20)]
    assert drawn == [fault_at(fault, 0, client, round) for client in range(50) for round in range(20)]
    assert 0.25 < sum(one is not None for one in drawn) / len(drawn) < 0.35
    assert drawn != [fault_at(fault, 1, client, round) for client in range(50) for round in range(20)]


def test_other_clients_fail_in_other_rounds() -> None:
    fault = (Fault("drop", 0.5),)
    patterns = {tuple(fault_at(fault, 0, client, round) for client in range(20)) for round in range(10)}
    assert len(patterns) == 10


def test_dropout_keeps_at_least_one_client() -> None:
    records, _ = rounds("drop:rate=1", [[1, 3]] * 3)
    assert [r.trained for r in records] == [[1]] * 3


@pytest.mark.parametrize(
    ("text", "words"), [("nann", "did you mean 'nan'"), ("nan:rate=2", "rate"), ("nan:who=3", "unknown setting")]
)
def test_a_wrong_fault_is_a_mistake(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_faults(text)
