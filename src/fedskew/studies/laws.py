"""What every method must satisfy, as checks that run on any method in seconds. `fedskew check` and the tests use them.

Each law is a function of a `Subject` that returns "" if the method satisfies it, a sentence that says what went wrong
if not, and None if the law does not apply to it. They run on a small skewed federation of scikit-learn's digits.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fedskew.core.method import Method, Update
from fedskew.core.settings import UsageError, build
from fedskew.core.tensors import Payload, Tensors
from fedskew.federation.loop import run
from fedskew.federation.protocol import Diverged, QuorumLost
from fedskew.federation.simulate.simulation import Simulation
from fedskew.federation.wire import digest
from fedskew.methods.fedavg import FedAvg
from fedskew.studies.randomness import Watch, torch_settings, watched
from fedskew.studies.sending_laws import (
    has_own_seed,
    ignores_who_it_is,
    payloads_can_be_sent,
    sends_no_samples,
    server_needs_only_sums,
)
from fedskew.studies.subject import ROUNDS, Subject, equal, fingerprints, one_round, train

LEARNING = 10  # rounds of the law that asks whether it learns
EASY = "sample:keep=400+iid:clients=5"
ONE_CLASS = "sample:keep=400+label-k:k=1,clients=10"
FEW = "sample:keep=60+iid:clients=40"


class Outcome(NamedTuple):
    """One law and what came of it."""

    law: str
    problem: str | None  # "": the method satisfies it; None: the law does not apply


def is_a_plain_value(subject: Subject) -> str:
    """It is a frozen dataclass that can be sent to a worker."""
    method = subject.method
    if pickle.loads(pickle.dumps(method)) != method:
        return "a pickled copy is not equal to it"
    return ""


def hooks_return_payloads(subject: Subject) -> str:
    """Hooks return what the loop expects."""
    world = subject.world()
    method = world.method
    server = method.init_server(world.server_site(0, "init"))
    if problem := not_a_payload(server, "init_server"):
        return problem
    broadcast = method.broadcast(server)
    if problem := not_a_payload(broadcast, "broadcast"):
        return problem
    made: Any = method.client(world.site(0, 0, "train"), broadcast, {})
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], Update)):
        return f"`client` returned {type(made).__name__}, expected an Update and the state: return update, state"
    if problem := not_a_payload(made[0].payload, "client", "update") or not_a_payload(made[1], "client", "state"):
        return problem
    fresh = method.aggregate(world.server_site(0, "train"), server, iter([made[0]]))
    personal = method.personalise(world.site(0, 0, "evaluate"), broadcast, made[1])
    return not_a_payload(fresh, "aggregate") or not_a_payload(personal, "personalise")


def not_a_payload(value: Any, hook: str, what: str = "result") -> str:
    """What is wrong with something that should be groups of named tensors; "" if nothing is."""
    if not isinstance(value, dict):
        return f"the {what} of `{hook}` is {type(value).__name__}, expected a payload: {{group: Tensors(name=tensor)}}"
    wrong = [group for group, tensors in value.items() if not isinstance(tensors, Tensors)]
    return f"the {what} of `{hook}` has a group {wrong[0]!r} that is no Tensors" if wrong else ""


def changes_no_argument(subject: Subject) -> str:
    """Hooks change none of their arguments.

    Nor the samples, nor settings of torch that hold for the whole process.
    """
    world = subject.world()
    method, states = world.method, dict[int, Payload]()
    samples: Payload = {"samples": Tensors(x=world.x, y=world.y)}
    old_samples = copy.deepcopy(samples)
    with torch_settings() as settings:
        server, _ = one_round(world, method.init_server(world.server_site(0, "init")), states, 0)
        broadcast, state = method.broadcast(server), states[0]
        before = *copy.deepcopy((server, broadcast, state)), old_samples
        update, _ = method.client(world.site(0, 1, "train"), broadcast, state)
        sent = copy.deepcopy(update.payload)
        method.aggregate(world.server_site(1, "train"), server, iter([update]))
        method.personalise(world.site(0, 1, "evaluate"), broadcast, state)
    if settings:
        return f"a hook changed {' and '.join(settings)} for the whole process: put it back before the hook returns"
    now = {"the server's payload": server, "the broadcast": broadcast, "the client's state": state}
    now |= {"the samples": samples}
    changed = [name for (name, value), old in zip(now.items(), before, strict=True) if not equal(value, old)]
    changed += [] if equal(update.payload, sent) else ["the update"]
    return f"a hook changed {' and '.join(changed)}: return new tensors instead" if changed else ""


def same_seed_same_bits(subject: Subject) -> str:
    """Two runs with one seed give the same bits."""
    if fingerprints(*train(subject.world())) == subject.bits:
        return ""
    return "two runs with the same seed differ: draw from site.rng only, and keep nothing in the method or its module"


def randomness_follows_the_seed(subject: Subject) -> str:
    """Random numbers come from the run's seed: no global generator is touched, no generator has a fixed seed.

    A seed that is a setting of the method, for what all clients must draw alike, may be fixed.
    """
    seen = list[Watch]()
    for seed in (0, 1):
        world = subject.world(seed=seed)
        server = world.method.init_server(world.server_site(0, "init"))
        sites = [world.site(client, 0, "train") for client in (0, 1)]
        with watched() as watch:
            broadcast = world.method.broadcast(server)
            sent = [world.method.client(site, broadcast, {})[0] for site in sites]
            world.method.aggregate(world.server_site(0, "train"), server, iter(sent))
        seen.append(watch)
    if seen[0].touched:
        return f"it draws from, or seeds, the global generator of {' and '.join(seen[0].touched)}: use site.rng"
    fixed = seen[0].seeds & seen[1].seeds
    if fixed and not has_own_seed(subject.method):
        return f"it seeds a generator with {min(fixed)} whatever the run's seed: use site.rng"
    return ""


def keeps_nothing_between_calls(subject: Subject) -> str:
    """A federation that was used before gives what a fresh one gives."""
    used = subject.world()
    train(used)
    if fingerprints(*train(used)) == subject.bits:
        return ""
    return "a run depends on what happened before it: return what must survive as server or client state"


def clients_may_be_absent(subject: Subject) -> str:
    """It works with one client, with few, and with clients that never trained, and stays finite."""
    world = subject.world()
    records, simulation = train(world, cohorts=[[1], [0, 3]])
    floats = [t for tensors in records[-1].server.values() for t in tensors.values() if t.is_floating_point()]
    if not all(t.isfinite().all() for t in floats):
        return "the server's state is not finite after a round with one client and one with two"
    simulation.evaluate(1, world.method.broadcast(records[-1].server))
    return ""


def small_clients_work(subject: Subject) -> str | None:
    """It works with clients of one class and with clients of one or two samples, and stays finite."""
    if subject.method.pooled:
        return None  # one client has the samples of all
    for split, words in ((ONE_CLASS, "clients of one class"), (FEW, "clients of one or two samples")):
        world = subject.world(split=split, rounds=1)
        try:
            records, simulation = train(world, cohorts=[[0, 1, 2]])
        except (Diverged, QuorumLost) as error:
            return f"with {words}, {error}"
        if records[-1].lost:
            return f"of {words}, one {next(iter(records[-1].lost.values()))}"
        floats = [t for tensors in records[-1].server.values() for t in tensors.values() if t.is_floating_point()]
        if not all(t.isfinite().all() for t in floats):
            return f"the server's state is not finite after a round with {words}"
        simulation.evaluate(0, world.method.broadcast(records[-1].server))
    return ""


def every_batch_norm_policy_works(subject: Subject) -> str:
    """It works when batch-norm statistics stay with the clients or do not move."""
    for policy in ("local", "frozen"):
        world = subject.world(batch_norm=policy)
        records, simulation = train(world)
        simulation.evaluate(0, world.method.broadcast(records[-1].server))
    return ""


def rounds_to_come_do_not_matter(subject: Subject) -> str | None:
    """What a round computes does not depend on the number of rounds, unless it says so (`depends_on_rounds`)."""
    method = subject.method
    if method.depends_on_rounds or list(method.stages(ROUNDS)) != list(method.stages(2 * ROUNDS))[:ROUNDS]:
        return None
    ends = []
    for rounds in (ROUNDS, 2 * ROUNDS):
        world, states = subject.world(rounds=rounds), dict[int, Payload]()
        server = method.init_server(world.server_site(0, "init"))
        for round in range(ROUNDS):
            server, _ = one_round(world, server, states, round)
        ends.append(digest(server))
    if ends[0] == ends[1]:
        return ""
    return "its first rounds are others if more rounds follow: let `depends_on_rounds` return True"


def terms_off_is_fedavg(subject: Subject) -> str | None:
    """With the settings it declares as `terms_off` it is FedAvg bit for bit."""
    off = subject.method.terms_off
    if off is None:
        return None
    method = build(type(subject.method), off, "terms_off")
    ours, _ = train(subject.world(method=method))
    plain, _ = train(subject.world(method=FedAvg()))
    same = all(equal({g: ours[-1].server[g]}, {g: plain[-1].server[g]}) for g in ("parameters", "buffers"))
    return "" if same else f"with {off} its model is not FedAvg's"


def it_learns(subject: Subject) -> str:
    """On an easy split its model gets more than half as far above chance as FedAvg's."""
    reached = []
    for method in (subject.method, FedAvg()):
        world = subject.world(method=method, split=EASY, rounds=LEARNING)
        records, simulation = train(world)
        metrics = simulation.evaluate(LEARNING - 1, method.broadcast(records[-1].server))
        shared, clients = metrics.global_, metrics.clients
        reached.append(shared.accuracy if shared is not None else clients.personal.mean if clients is not None else 0.0)
    ours, plain = reached
    chance = 1 / world.classes
    if ours - chance > (plain - chance) / 2:
        return ""
    return f"after {LEARNING} rounds on IID digits its model has {ours:.0%}, FedAvg's {plain:.0%}, chance {chance:.0%}"


def any_number_of_workers(subject: Subject) -> str:
    """One process and two worker processes give the same bits."""
    found = set()
    for workers in (1, 2):
        world = subject.world()
        with Simulation(world, workers=workers) as simulation:
            *_, last = run(world.method, simulation, simulation.world.server_site, ROUNDS, lambda round: [0, 1, 2, 4])
            found.add((*fingerprints([last], simulation), str(last.metrics)))
    return "" if len(found) == 1 else "one process and two workers give different results"


LAWS: dict[str, Callable[[Subject], str | None]] = {
    (law.__doc__ or "").split("\n")[0].rstrip("."): law
    for law in (
        is_a_plain_value,
        hooks_return_payloads,
        changes_no_argument,
        payloads_can_be_sent,
        sends_no_samples,
        ignores_who_it_is,
        same_seed_same_bits,
        randomness_follows_the_seed,
        keeps_nothing_between_calls,
        clients_may_be_absent,
        small_clients_work,
        every_batch_norm_policy_works,
        rounds_to_come_do_not_matter,
        terms_off_is_fedavg,
        server_needs_only_sums,
        it_learns,
        any_number_of_workers,
    )
}


def check(method: Method, model: str = Subject.model) -> Iterator[Outcome]:
    """Check a method law by law. An exception of the method's own is a problem of that law, not of the caller."""
    subject = Subject(method, model)
    subject.world()  # a mistake in the settings is the user's: it is raised, not reported as a law
    for words, law in LAWS.items():
        try:
            yield (outcome := Outcome(words, law(subject)))
            if outcome.problem and law is hooks_return_payloads:
                return  # all others would fail for the same reason
        except UsageError as error:
            yield Outcome(words, str(error))
        except Exception as error:  # the method is the user's: it may raise anything
            yield Outcome(words, f"it raised {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
