"""What every method must satisfy, tested once for all of them."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from functools import cache

import pytest
import torch

from fedskew.core.files import sha256
from fedskew.core.method import Method, Update
from fedskew.core.settings import build
from fedskew.core.tensors import Payload
from fedskew.federation.loop import run
from fedskew.federation.protocol import Record
from fedskew.federation.simulate.simulation import Simulation
from fedskew.federation.wire import decode, digest, encode, layout_of
from fedskew.federation.world import World
from fedskew.methods import REGISTRY
from fedskew.methods.fedavg import FedAvg
from fedskew.studies.laws import rounds_to_come_do_not_matter, small_clients_work
from fedskew.studies.sending_laws import ignores_who_it_is, sends_no_samples, server_needs_only_sums
from fedskew.studies.subject import Subject
from helpers.methods import each
from toys import digits, rounds, same

CONTROLS = {"local", "central", "publiconly"}
PUBLIC = "public:per_class=4+"  # put before the split of a method that needs public data


def world_of(name: str, *, off: bool = False, seed: int = 0) -> World:
    kind = REGISTRY[name]
    method = kind(**(kind.terms_off or {} if off else kind.quick))
    split = "dirichlet:alpha=0.5,clients=5,min=5"
    return digits(method, split=PUBLIC + split if kind.public else split, count=2, seed=seed)


def bits(records: list[Record], simulation: Simulation) -> list[str]:
    """Fingerprints of the server's last state and of every client's."""
    store = simulation.store
    return [digest(records[-1].server), *(sha256(store.get(c)) for c in range(simulation.population))]


@cache
def two_rounds(name: str) -> list[str]:
    """What two rounds in a fresh world come to."""
    return bits(*rounds(world_of(name), 2))


declared = pytest.mark.parametrize("name", REGISTRY)  # for tests that read a method's declarations
every_method = pytest.mark.parametrize("name", each(REGISTRY))  # for tests that run it


def one_round(world: World, server: Payload, states: dict[int, Payload], round: int) -> tuple[Payload, list[Update]]:
    broadcast, updates = world.method.broadcast(server), []
    for client in range(world.population):
        update, states[client] = world.method.client(
            world.site(client, round, "train"), broadcast, states.get(client, {})
        )
        updates.append(update)
    return world.method.aggregate(world.server_site(round, "train"), server, iter(updates)), updates


@pytest.mark.slow
@every_method
def test_keeps_the_laws_of_small_clients_and_of_what_leaves_them(name: str) -> None:
    kind = REGISTRY[name]
    subject = Subject(kind(**kind.quick))
    for law in (sends_no_samples, ignores_who_it_is, small_clients_work, rounds_to_come_do_not_matter):
        assert not law(subject), law.__name__


@declared
def test_is_a_frozen_value_with_checked_settings(name: str) -> None:
    method = REGISTRY[name]()
    assert pickle.loads(pickle.dumps(method)) == method == type(method)()
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.anything = 1  # type: ignore[attr-defined]


@declared
def test_extends_method_and_nothing_else(name: str) -> None:
    assert REGISTRY[name].__bases__ == (Method,)


@every_method
def test_touches_no_argument(name: str) -> None:
    world = world_of(name)
    method, states = world.method, {}
    server = method.init_server(world.server_site(0, "init"))
    server, _ = one_round(world, server, states, 0)
    broadcast, state = method.broadcast(server), states[0]
    before = copy.deepcopy((server, broadcast, state))
    update, _ = method.client(world.site(0, 1, "train"), broadcast, state)
    sent = copy.deepcopy(update.payload)
    method.aggregate(world.server_site(1, "train"), server, iter([update]))
    method.personalise(world.site(0, 1, "evaluate"), broadcast, state)
    assert same(server, before[0])
    assert same(broadcast, before[1])
    assert same(state, before[2])
    assert same(update.payload, sent)


@every_method
def test_payloads_survive_the_wire_and_updates_keep_their_layout(name: str) -> None:
    world = world_of(name)
    server = world.method.init_server(world.server_site(0, "init"))
    states: dict[int, Payload] = {}
    layouts = set()
    for round in range(2):
        server, updates = one_round(world, server, states, round)
        for payload in (server, world.method.broadcast(server), *states.values(), *(u.payload for u in updates)):
            assert same(payload, decode(encode(payload)))
        layouts |= {layout_of(u.payload) for u in updates}
    assert len(layouts) == 1


@every_method
def test_another_seed_gives_other_bits(name: str) -> None:
    """That the same one gives the same bits is part of `test_nothing_depends_on_what_a_site_did_before`."""
    assert bits(*rounds(world_of(name, seed=1), 2)) != two_rounds(name)


@every_method
def test_a_round_depends_on_the_number_of_rounds_only_if_the_method_says_so(name: str) -> None:
    """More rounds are allowed later for the others, so the same rounds of a longer run must have the same bits."""
    longer = bits(*rounds(dataclasses.replace(world_of(name), rounds=7), 2))
    assert (longer != two_rounds(name)) == world_of(name).method.depends_on_rounds


@every_method
def test_nothing_depends_on_what_a_site_did_before(name: str) -> None:
    """The scratch net and its spares are meaningless between calls: a used world gives what a fresh one does."""
    used = world_of(name)
    rounds(used, 1)
    assert bits(*rounds(used, 2)) == two_rounds(name)


@every_method
def test_partial_participation_and_single_clients_work(name: str) -> None:
    world = world_of(name)
    records, simulation = rounds(world, 2, cohorts=[[1], [0, 3], [0, 3]])  # a method may add a round
    assert all(t.isfinite().all() for ts in records[-1].server.values() for t in ts.values() if t.is_floating_point())
    assert {c for c in range(5) if c in simulation.store} == {0, 1, 3}
    metrics = simulation.evaluate(1, world.method.broadcast(records[-1].server))
    assert metrics.clients.never_trained == 2
    assert (metrics.global_ is not None) == world.method.has_global


@every_method
@pytest.mark.parametrize("policy", ["local", "frozen"])
def test_every_batch_norm_policy_works(name: str, policy: str) -> None:
    world = world_of(name)
    world.training = dataclasses.replace(world.training, batch_norm=policy)
    records, simulation = rounds(world, 1)
    metrics = simulation.evaluate(0, world.method.broadcast(records[-1].server))
    assert 0 <= metrics.clients.personal.mean <= 1


@every_method
def test_a_step_in_bfloat16_is_near_one_in_float32_and_keeps_float32_tensors(name: str) -> None:
    """Losses and what methods derive from features see float32, so that no method can fail on the type."""
    servers = []
    for precision in ("float32", "bf16"):
        world = world_of(name)
        world.training = dataclasses.replace(world.training, steps=1, precision=precision)
        records, simulation = rounds(world, 1)
        servers.append(records[-1].server)
        states = [decode(blob) for c in range(world.population) if (blob := simulation.store.get(c))]
        for payload in (records[-1].server, *states):
            for tensors in payload.values():
                assert all(t.dtype != torch.bfloat16 for t in tensors.values())
                assert all(t.isfinite().all() for t in tensors.values() if t.is_floating_point())
    exact, half = (server.get("parameters", {}) for server in servers)
    assert all(torch.allclose(exact[n], half[n], atol=0.02) for n in exact)


@pytest.mark.parametrize("name", each(name for name, kind in REGISTRY.items() if kind.terms_off is not None))
def test_without_its_own_terms_it_is_fedavg_bit_for_bit(name: str) -> None:
    off = world_of(name, off=True)
    a, _ = rounds(off, 2)
    split = "dirichlet:alpha=0.5,clients=5,min=5"
    plain = digits(FedAvg(), split=PUBLIC + split if REGISTRY[name].public else split, count=2)
    b, _ = rounds(plain, 2)
    for group in ("parameters", "buffers"):
        assert same({group: a[-1].server[group]}, {group: b[-1].server[group]})


@declared
def test_the_declarations_are_complete_and_valid(name: str) -> None:
    """Paper or control, a summary, and settings with a meaning, a source and a range that their types allow."""
    kind = REGISTRY[name]
    assert (kind.paper is None) == (name in CONTROLS)
    assert kind.__doc__
    assert not kind.__doc__.startswith(f"{kind.__name__}(")  # the one that dataclass makes
    for values in (kind.quick, kind.terms_off or {}):
        build(kind, values, name)
    for field in dataclasses.fields(kind):
        assert field.metadata["help"], field.name
        assert field.metadata["source"], field.name
        if field.metadata["search"] is not None:
            low, high = field.metadata["search"]
            assert 0 < low < high
            assert field.default is None or low <= field.default <= high
            assert [getattr(build(kind, {field.name: end}, name), field.name) for end in (low, high)] == [low, high]


@declared
def test_the_docstring_of_its_file_opens_with_the_declared_paper(name: str) -> None:
    kind = REGISTRY[name]
    if kind.paper is not None:
        title, reference, text = (inspect.getdoc(inspect.getmodule(kind)) or "").split("\n\n", 2)
        assert " ".join(title.split()).endswith(f"{kind.paper.title}.")
        assert " ".join(reference.split()) == kind.paper.reference
        assert text


@pytest.mark.parametrize("name", each(name for name, kind in REGISTRY.items() if kind.sums_only))
def test_a_server_that_declares_to_need_only_sums_needs_no_more(name: str) -> None:
    assert server_needs_only_sums(Subject(REGISTRY[name](**REGISTRY[name].quick))) == ""


# not ifca: on so few samples all its clients choose one model, whose mean needs only sums
@pytest.mark.parametrize("name", [name for name, kind in REGISTRY.items() if not kind.sums_only and name != "ifca"])
def test_a_method_that_declares_to_need_single_models_does(name: str) -> None:
    """Otherwise it would be refused where only sums are allowed, without a reason."""
    method = REGISTRY[name](**REGISTRY[name].quick)
    assert server_needs_only_sums(Subject(method), declared=True) != ""


@pytest.mark.slow  # three processes for each method
@pytest.mark.usefixtures("quick_workers")
@declared
def test_the_bits_are_the_same_for_one_and_three_workers(name: str) -> None:
    digests = set()
    for workers in (1, 3):
        world = world_of(name)
        with Simulation(world, workers=workers) as simulation:
            loop = run(world.method, simulation, simulation.world.server_site, 2, lambda round: [0, 1, 2, 4])
            *_, record = loop
            assert simulation.pool is None or simulation.pool.performed["workers"] > 0
            digests.add((*bits([record], simulation), str(record.metrics)))
    assert len(digests) == 1


def test_state_belongs_to_its_client_under_partial_participation() -> None:
    """The fault of collections that zip a cohort with the order of arrival."""

    @dataclasses.dataclass(frozen=True)
    class Signed(Method):
        def client(self, site, broadcast, state):  # type: ignore[no-untyped-def]
            update, kept = super().client(site, broadcast, state)
            mark = torch.tensor(site.client)
            assert not state or state["mark"]["client"] == site.client
            return update, kept | {"mark": type(update.payload["parameters"])(client=mark)}

    _, simulation = rounds(digits(Signed()), 4, cohorts=[[4, 1], [1, 3], [0, 4], [1, 4]])
    for client in (0, 1, 3, 4):
        assert decode(simulation.store.get(client))["mark"]["client"] == client
