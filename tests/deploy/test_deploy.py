"""A run between sites is the run in one process, bit for bit; and what goes wrong at a site is that site's loss."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from alike import alike

from fedskew.core.settings import UsageError
from fedskew.core.training import Training
from fedskew.data.dataset import DataSet
from fedskew.data.sources.loading import load
from fedskew.data.split.partition import Partition, Parts
from fedskew.deploy import handshake as own
from fedskew.deploy.flower.frames import Header
from fedskew.deploy.messages import Request, SiteFacts, Task, as_header
from fedskew.deploy.node import Node
from fedskew.deploy.policy import Policy
from fedskew.deploy.states import States
from fedskew.experiment import use
from fedskew.experiment.config import Evaluation, Experiment, Trouble
from fedskew.experiment.live import ACCURACY, ClientFigures, Lines
from fedskew.experiment.nets import net_maker
from fedskew.experiment.run import Run
from fedskew.experiment.run_directory import read_run
from fedskew.federation.cohort import draw_cohort
from fedskew.federation.loop import run
from fedskew.federation.make_world import make_world
from fedskew.federation.private import Privacy
from fedskew.federation.protocol import QuorumLost
from fedskew.federation.simulate.simulation import Simulation
from fedskew.federation.store import Damaged
from fedskew.federation.wire import decode, digest, encode
from fedskew.methods import REGISTRY
from fedskew.methods.central import Central
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.scaffold import SCAFFOLD
from helpers.methods import each
from sites import NAMES, few_digits, nodes_in, served

SPLIT = "dirichlet:alpha=0.5,clients=3"


def experiment(name: str = "scaffold", **changes: Any) -> Experiment:
    method = REGISTRY[name](**REGISTRY[name].quick)
    split = f"public:per_class=5+{SPLIT}" if method.public else SPLIT
    privacy = Privacy(min_count=5)  # what `serve` would choose; in one process the default is 1
    what = Experiment(method=method, split=split, rounds=3, training=Training(batch_size=64), privacy=privacy)
    return replace(what, **changes)


def in_one_process(what: Experiment, folder: Path) -> tuple[Any, list[Any]]:
    alone = Run(replace(what, data=few_digits(folder)))
    metrics = [record.metrics for record in alone]
    return alone.result, metrics


@pytest.mark.parametrize("name", each(name for name, kind in REGISTRY.items() if not kind.pooled))
def test_every_method_gives_the_same_bits_between_sites_as_in_one_process(name: str, tmp_path: Path) -> None:
    what = experiment(name, rounds=2)
    result, metrics = in_one_process(what, tmp_path)
    between, _ = served(what, tmp_path)
    list(between)
    assert between.result.digest == result.digest
    assert alike(between.result.metrics, result.metrics)
    assert alike(between.result.clients, result.clients)
    assert alike([record.metrics for record in between.records], metrics)
    assert alike([record.metrics for record in read_run(tmp_path / "run").records], metrics)


@pytest.mark.parametrize(("rounds", "cohort"), [(1, 1), (5, 2)])
def test_a_cohort_smaller_than_the_population_and_seldom_evaluation_are_the_same_too(
    rounds: int, cohort: int, tmp_path: Path
) -> None:
    what = experiment(rounds=rounds, clients_per_round=cohort, evaluation=Evaluation(every=2, clients=2))
    result, metrics = in_one_process(what, tmp_path)
    between, _ = served(what, tmp_path)
    list(between)
    assert between.result.digest == result.digest
    assert alike([record.metrics for record in between.records], metrics)


def test_a_site_gets_one_message_a_round_and_one_to_close(tmp_path: Path) -> None:
    """Three rounds: each site is greeted, asked three times, asked for its last figures, and told of the end."""
    between, played = served(experiment(), tmp_path)
    list(between)
    kinds = [ask["kind"] for place, ask in played.asked if place == 1]
    assert kinds == ["hello", "work", "work", "work", "work", "done"]
    work = [ask for place, ask in played.asked if place == 1 and ask["kind"] == "work"]
    assert [(ask["train"], ask["evaluate_round"]) for ask in work] == [(True, -1), (True, 0), (True, 1), (False, 2)]
    assert played.closed


def test_a_state_counts_only_if_its_update_was_accepted(tmp_path: Path) -> None:
    """Client 1 sends NaN in round 2: as in the simulator, its new control variate is dropped with its update."""
    what = experiment(rounds=4, trouble=Trouble(fault="nan:client=1,round=1"))
    result, _ = in_one_process(what, tmp_path)

    def spoil(place: int, ask: Header, answer: Header, payload: bytes) -> tuple[Header, bytes]:
        if place == 1 and ask["kind"] == "work" and ask["train"] and ask["round"] == 1:
            update = decode(bytearray(payload))
            next(iter(update["parameters"].values())).view(-1)[0] = float("nan")
            payload = bytes(encode(update))
        return answer, payload

    between, played = served(what, tmp_path, spoil=spoil)
    records = list(between)
    assert "not finite" in records[1].lost[1]
    assert between.result.digest == result.digest
    bases = [ask["base"] for place, ask in played.asked if place == 1 and ask["kind"] == "work"]
    assert bases == [-1, 0, 0, 2, 3]
    assert not list((tmp_path / NAMES[1]).rglob("000001-*"))  # nor is it still on the site's disk


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_server_that_was_killed_goes_on_with_every_site_in_step(stop: int, tmp_path: Path) -> None:
    what = experiment(rounds=4)
    result, metrics = in_one_process(what, tmp_path)
    first, _ = served(what, tmp_path)
    rounds = iter(first)
    for _ in range(stop):
        next(rounds)
    first.directory.close()  # as the kernel would
    again, _ = served(what, tmp_path, resume=True)
    assert again.start is not None
    assert again.start[0] == stop
    assert len(list(again)) == 4 - stop
    assert again.result.digest == result.digest
    assert alike([record.metrics for record in again.records], metrics)


def test_a_server_whose_last_checkpoint_is_torn_goes_back_one_round_and_the_sites_with_it(tmp_path: Path) -> None:
    """It dies in round 5, when the sites have done that round already; the checkpoint of round 4 is torn."""
    what = experiment(rounds=5)
    result, _ = in_one_process(what, tmp_path)

    def die(place: int, ask: Header, answer: Header, payload: bytes) -> tuple[Header, bytes]:
        if place == 2 and ask["round"] == 4:
            raise RuntimeError("killed")
        return answer, payload

    first, _ = served(what, tmp_path, spoil=die)
    with pytest.raises(RuntimeError, match="killed"):
        list(first)
    newest = first.directory.checkpoints()[0]
    newest.write_bytes(newest.read_bytes()[:-1])
    again, _ = served(what, tmp_path, resume=True)
    assert again.start is not None
    assert again.start[0] == 3
    list(again)
    assert again.result.digest == result.digest


def test_a_site_serves_one_run_after_another(tmp_path: Path) -> None:
    nodes = nodes_in(tmp_path, policy=Policy(methods=frozenset({"scaffold"})))
    for place, lr in enumerate((0.1, 0.05)):
        what = experiment(training=Training(lr=lr, batch_size=64))
        result, _ = in_one_process(what, tmp_path)
        (tmp_path / str(place)).mkdir()
        between, _ = served(replace(what, data=few_digits(tmp_path)), tmp_path / str(place), nodes=nodes)
        list(between)
        assert between.result.digest == result.digest


def test_a_reply_to_an_earlier_message_is_not_taken_for_one_to_this(tmp_path: Path) -> None:
    def stale(place: int, ask: Header, answer: Header, payload: bytes) -> tuple[Header, bytes]:
        if place == 0 and ask["kind"] == "work":
            played.told.put(({"event": "reply", "batch": 0, "node": 101, "header": {"lost": "old"}}, b""))
        return answer, payload

    between, played = served(experiment("fedavg", rounds=2), tmp_path, spoil=stale)
    assert [record.lost for record in between] == [{}, {}]


def test_a_run_that_is_done_is_not_run_again(tmp_path: Path) -> None:
    first, _ = served(experiment(), tmp_path)
    list(first)
    again, played = served(experiment(), tmp_path, resume=True)
    assert list(again) == []
    assert again.result.digest == first.result.digest
    assert not played.asked


def test_a_site_that_lost_its_state_is_left_out_and_says_so(tmp_path: Path) -> None:
    nodes = nodes_in(tmp_path)
    between, _ = served(experiment(rounds=3), tmp_path, nodes=nodes)
    rounds = iter(between)
    next(rounds)
    for path in (tmp_path / NAMES[2]).rglob("*.safetensors"):
        path.write_bytes(b"not what was written")
    record = next(rounds)
    assert list(record.lost) == [2]
    assert "missing or damaged" in record.lost[2]


@pytest.mark.slow
def test_sites_that_do_not_answer_are_left_out_after_the_time_out(tmp_path: Path) -> None:
    def silent(place: int, ask: Header, answer: Header, payload: bytes) -> tuple[Header, bytes] | None:
        return None if place == 0 and ask["kind"] == "work" else (answer, payload)

    between, played = served(experiment(rounds=2, method=FedAvg()), tmp_path, spoil=silent, timeout=0.2)
    records = list(between)
    assert [record.lost for record in records] == [{0: "did not answer within 0.2 s"}] * 2
    assert [record.trained for record in records] == [[1, 2]] * 2
    assert records[-1].metrics is not None
    assert records[-1].metrics.clients.personal.clients == 2
    assert len(played.forgotten) >= 2


def test_too_few_sites_stop_the_run_with_its_state_and_it_goes_on_when_they_are_back(tmp_path: Path) -> None:
    what = experiment(rounds=3, trouble=Trouble(quorum=3))
    result, _ = in_one_process(what, tmp_path)

    def leaves(place: int, ask: Header, answer: Header, payload: bytes) -> tuple[Header, bytes]:
        return ({"left": "is not online"}, b"") if place == 1 and ask["round"] == 1 else (answer, payload)

    between, played = served(what, tmp_path, spoil=leaves)
    with pytest.raises(QuorumLost, match="client 1 is not online"):
        list(between)
    assert played.closed
    again, _ = served(what, tmp_path, resume=True)
    list(again)
    assert again.result.digest == result.digest


NOT_A_REPLY = "sent an invalid reply"


@pytest.mark.parametrize(
    ("change", "blob", "words"),
    [
        ({}, b"garbage", NOT_A_REPLY),
        ({}, b"", "sent no parameters/"),
        ({"weight": "much"}, None, NOT_A_REPLY),
        ({"surprise": 1}, None, NOT_A_REPLY),
        ({"weight": 1e999}, None, "not finite as weight"),
        ({"metrics": {"loss": float("nan")}}, None, "not finite as loss"),
        ({"metrics": {f"m{i}": 0.0 for i in range(200)}}, None, "sent too many metrics"),
        ({"personal": [[-1] * 10, [1] * 10, 0.0]}, None, ""),
        ({"personal": [[1], [1], 0.0]}, None, ""),
        ({"personal": [[1], [1] * 10, 0.0]}, None, ""),
        ({"personal": [[1] * 10, [1] * 10, float("inf")]}, None, ""),
    ],
)
def test_whatever_a_site_sends_is_checked_and_the_site_named(
    change: dict[str, Any], blob: bytes | None, words: str, tmp_path: Path
) -> None:
    def spoil(place: int, ask: Header, answer: Header, payload: bytes) -> tuple[Header, bytes]:
        if place == 2 and ask["kind"] == "work":
            return answer | change, payload if blob is None else blob
        return answer, payload

    between, _ = served(experiment("fedavg", rounds=2), tmp_path, spoil=spoil)
    records = list(between)
    for record in records:
        assert list(record.lost) == ([2] if words else [])
        assert words in record.lost.get(2, "")
    assert records[-1].metrics is not None
    if "personal" in change:  # figures that make no sense are left out of the summary
        assert records[-1].metrics.clients.personal.clients == 2


def test_a_cohort_may_be_drawn_from_the_sites_that_are_online(tmp_path: Path) -> None:
    what = experiment("fedavg", rounds=2, clients_per_round=2)
    between, played = served(what, tmp_path, choose="online")
    played.told.put(({"event": "nodes", "online": [100, 102]}, b""))
    rounds = iter(between)
    record = next(rounds)
    assert record.cohort in ([0, 1], [0, 2], [1, 2])
    assert between.roster.present() == [0, 2]
    assert next(rounds).cohort == [0, 2]


def test_what_flower_reports_is_printed(tmp_path: Path) -> None:
    said: list[str] = []
    between, played = served(experiment("fedavg", rounds=1), tmp_path, said=said)
    played.told.put(({"event": "late", "node": 101}, b""))
    played.told.put(({"event": "note", "text": "refused somebody"}, b""))
    played.told.put(({"event": "reply", "batch": -5, "node": 101, "header": {}}, b""))
    played.told.put(({"event": "nodes", "online": [100, 101]}, b""))
    list(between)
    assert "warning: site south answered too late: dropped" in said
    assert "warning: refused somebody" in said
    assert "site north is online" in said
    assert "site west is offline" in said


def test_a_late_reply_to_an_earlier_request_does_not_count_for_the_present_one(tmp_path: Path) -> None:
    """South answers the first request while it is silent to the second."""

    def silent(place: int, ask: Header, answer: Header, payload: bytes) -> tuple[Header, bytes] | None:
        return None if place == 1 and ask.get("round") == 1 else (answer, payload)

    between, played = served(experiment("fedavg", rounds=2), tmp_path, spoil=silent, timeout=0.2)
    rounds = iter(between)
    next(rounds)
    late = {"event": "reply", "batch": between.roster.batch, "node": 101, "header": {}}
    played.told.put((late, b""))
    assert next(rounds).lost == {1: "did not answer within 0.2 s"}


def test_sites_without_keys_tell_their_names_and_a_second_of_one_name_is_refused(tmp_path: Path) -> None:
    said: list[str] = []
    nodes = nodes_in(tmp_path)
    twin = Node(few_digits(tmp_path), States(tmp_path / "twin"), name="north")
    between, _ = served(
        experiment("fedavg", rounds=1),
        tmp_path,
        nodes=[nodes[2], twin, nodes[1], nodes[0]],
        said=said,
        open=True,
        sites=3,
    )
    record = next(iter(between))
    assert between.agreed.sites == ["north", "south", "west"]
    assert record.trained == [0, 1, 2]
    assert "warning: site north is refused: a second site named 'north'; each site needs its own --name" in said
    assert between.roster.nodes == {"west": 100, "north": 101, "south": 102}


@pytest.mark.slow
def test_a_run_waits_for_its_sites_only_so_long(tmp_path: Path) -> None:
    few = nodes_in(tmp_path)[:1]
    between, _ = served(experiment("fedavg"), tmp_path, nodes=few, open=True, sites=3)
    with pytest.raises(UsageError, match="1 of 3 sites joined within"):
        list(between)
    many, _ = served(
        experiment("fedavg", trouble=Trouble(quorum=2)), tmp_path / "b", nodes=nodes_in(tmp_path / "b")[:1]
    )
    many.agreed.sites[:] = NAMES
    with pytest.raises(QuorumLost, match="1 of 3 sites joined within"):
        list(many)


def test_the_split_must_make_as_many_clients_as_there_are_sites(tmp_path: Path) -> None:
    between, _ = served(experiment("fedavg", split="iid:clients=4"), tmp_path, open=True)
    with pytest.raises(UsageError, match="4 clients, but there are 3 sites; give a split with clients=3"):
        list(between)


# data of the sites' own


def own_data(folder: Path) -> list[str]:
    """Three files of digits: no site has all classes, and class 9 is at one only."""
    data = load("digits")
    x, y = data.x_train[:600], data.y_train[:600]
    paths = []
    for name, classes in zip(NAMES, ((0, 1, 2, 3, 4, 5), (3, 4, 5, 6, 7, 8), (1, 2, 7, 8, 9)), strict=True):
        mine = np.isin(y, classes)
        paths.append(str(folder / f"{name}.npz"))
        np.savez(paths[-1], x_train=x[mine], y_train=y[mine])
    np.savez(folder / "test.npz", x_train=data.x_test[:300], y_train=data.y_test[:300])
    return paths


def test_sites_with_data_of_their_own_work_as_one_federation(tmp_path: Path) -> None:
    """The same as a world made of all sites' samples end to end, each site its own part of it."""
    paths = own_data(tmp_path)
    what = experiment("scaffold", data="sites", model="mlp")
    between, _ = served(what, tmp_path, nodes=nodes_in(tmp_path, paths))
    records = list(between)
    task = between.agreed.task
    assert task is not None
    assert task.labels == tuple("0123456789")

    sets = [own.relabelled(load(path), task) for path in paths]
    assert set(sets[1].y_train.tolist()) == {3, 4, 5, 6, 7, 8}
    pools = [data.pooled() for data in sets]
    everything = replace(
        pools[0],
        x_train=np.concatenate([pool.x_train for pool in pools]),
        y_train=np.concatenate([pool.y_train for pool in pools]),
    )
    sizes = np.cumsum([0, *(len(pool.y_train) for pool in pools)])
    parts = [
        Parts(np.arange(start, start + len(data.y_train)), own.NO_SAMPLES, np.arange(start + len(data.y_train), end))
        for data, start, end in zip(sets, sizes[:-1], sizes[1:], strict=True)
    ]
    world = make_world(
        everything,
        Partition(tuple(part.train for part in parts), own.NO_SAMPLES),
        parts,
        method=SCAFFOLD(),
        training=what.training,
        make_net=net_maker(what, everything),
        seed=0,
        rounds=3,
    )
    simulation = Simulation(world)
    alone = list(run(SCAFFOLD(), simulation, world.server_site, 3, lambda r: draw_cohort(range(3), 3, 0, r)))
    assert digest(records[-1].server) == digest(alone[-1].server)
    assert records[-1].metrics is not None
    assert alone[-1].metrics is not None
    assert alike(records[-1].metrics.clients, alone[-1].metrics.clients)
    assert records[-1].metrics.global_ is None


def test_the_server_may_have_a_test_set_of_its_own_and_a_resumed_run_keeps_the_task(tmp_path: Path) -> None:
    paths = own_data(tmp_path)
    what = experiment("fedavg", data="sites")
    test = str(tmp_path / "test.npz")
    between, _ = served(what, tmp_path, nodes=nodes_in(tmp_path, paths), server_data=test)
    first = next(iter(between))
    assert first.metrics is not None
    assert sum(v is not None for v in first.metrics.global_.per_class) == 10
    task = between.agreed.task
    between.directory.close()
    again, _ = served(what, tmp_path, nodes=nodes_in(tmp_path, paths), resume=True)
    last = list(again)[-1]
    assert last.metrics is not None
    assert last.metrics.global_ is not None
    assert again.agreed.task == task


def test_pixels_are_normalised_over_all_sites_as_over_one_set() -> None:
    data = load("digits")
    halves = [replace(data, x_train=data.x_train[:500]), replace(data, x_train=data.x_train[500:])]
    task = own.agree({str(i): own.facts_of(half) for i, half in enumerate(halves)})
    assert task.mean == pytest.approx(data.mean, rel=1e-12)
    assert task.std == pytest.approx(data.std, rel=1e-12)


def test_sites_with_tables_fill_and_scale_them_alike(tmp_path: Path) -> None:
    """Three hospitals: one lacks a column, one has a ward of its own; what the server keeps can be used."""
    rows = {
        "north": [f"{i},{'' if i % 3 else 1},{'ab'[i % 2]},{i % 2}" for i in range(20)],
        "south": [f"{i + 5},,{'ab'[i % 2]},{i % 2}" for i in range(20)],
        "west": [f"{i - 5},{i % 4},{'bc'[i % 2]},{i % 2}" for i in range(20)],
    }
    for name, lines in rows.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,ca,ward,y", *lines]) + "\n")
    paths = [f"{tmp_path}/{name}.csv" for name in rows]
    said: list[str] = []
    what = replace(experiment("fedavg"), data="sites", model="mlp:hidden=4")
    between, _ = served(what, tmp_path, nodes=nodes_in(tmp_path, paths), said=said)
    last = list(between)[-1]
    assert last.metrics is not None
    assert last.metrics.clients is not None
    assert any("missing values in 1 column by column means; indicator columns for ca" in line for line in said)
    model = use.load(tmp_path / "run")
    assert model.card.clients == ("north", "south", "west")
    assert model.card.table is not None
    assert model.card.table.features == ("age", "ca", "ca missing", "ward=a", "ward=b", "ward=c")
    assert len(model.predict(tmp_path / "west.csv").classes) == 20
    with pytest.raises(UsageError, match="a site's own model stays with the site"):
        use.load(tmp_path / "run", client="west")


def facts(**changes: Any) -> SiteFacts:
    return SiteFacts(**({"shape": (4,), "kind": "float32", "labels": ("a", "b"), "samples": 9} | changes))


def test_classes_are_those_of_all_sites_numbers_by_value() -> None:
    assert own.agree({"a": facts(labels=("2", "10")), "b": facts(labels=("1", "10"))}).labels == ("1", "2", "10")
    assert own.agree({"a": facts(), "b": facts(labels=("b", "c"))}).labels == ("a", "b", "c")


def test_sites_whose_data_do_not_fit_are_named() -> None:
    with pytest.raises(UsageError, match=r"site b has samples of float32\[5\], the others of float32\[4\]"):
        own.agree({"a": facts(), "b": facts(shape=(5,)), "c": facts()})
    with pytest.raises(UsageError, match="the samples of all sites are of one class, a"):
        own.agree({"a": facts(labels=("a",))})
    data = load("digits")
    task = own.agree({"a": own.facts_of(data)})
    with pytest.raises(UsageError, match="has the class '9', which is not one of this run's classes"):
        own.relabelled(data, own.Task(task.shape, task.kind, task.labels[:9], task.mean, task.std))
    with pytest.raises(
        UsageError, match=r"digits has samples of uint8\[8, 8, 1\], but this run needs uint8\[9, 9, 1\]"
    ):
        own.relabelled(data, own.Task((9, 9, 1), "uint8", task.labels, task.mean, task.std))


def test_a_method_with_public_data_needs_them_on_the_server() -> None:
    public = next(name for name, kind in REGISTRY.items() if kind.public)
    task = own.agree({"a": own.facts_of(load("digits"))})
    with pytest.raises(UsageError, match="--server-data"):
        own.server_world(experiment(public), task, None, 3, "cpu")
    world = own.server_world(experiment(public), task, load("digits"), 3, "cpu")
    assert len(world.public) == len(load("digits").y_train)


# a site


def ask(**changes: Any) -> Header:
    settings = {"method": {"name": "fedavg"}, "split": SPLIT}
    return as_header(Request("work", "0123456789abcdef", "digits", settings=settings)) | changes


@pytest.mark.parametrize(
    ("header", "blob", "words"),
    [
        (ask(run="../../etc"), b"", "the request is invalid"),
        (ask(), b"garbage", "not a payload"),
        ({"kind": "work"}, b"", "missing required field"),
        (
            ask(data="mnist", kind="hello"),
            b"",
            "this run splits mnist, but this site joined with other data",
        ),
        (ask(settings={"method": {"name": "fedavgg"}}), None, "unknown method 'fedavgg'; did you mean 'fedavg'?"),
        (ask(settings={"split": SPLIT}, sites=4), None, "the split has 3 clients, but there are 4 sites"),
        (ask(client=0, sites=3, initial="0"), None, "its initial model differs from the server's"),
        (ask(data="sites", sites=3), None, "does not contain the common task"),
    ],
)
def test_a_site_says_why_it_cannot_take_part(header: Header, blob: bytes | None, words: str, tmp_path: Path) -> None:
    node = Node("digits", States(tmp_path), name="north")
    answer, payload = node.reply(json.loads(json.dumps(header)), bytes(encode({})) if blob is None else blob)
    assert words in answer.lost
    assert payload == b""


def test_a_site_without_training_data_and_one_whose_method_fails_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    between, _ = served(experiment("fedavg", rounds=2), tmp_path)
    rounds = iter(between)
    next(rounds)
    nodes = between.channel.nodes  # type: ignore[attr-defined]
    world = nodes[0].cached[1]
    world.train = type(world.train).of([own.NO_SAMPLES] * 3)
    nodes[1].cached[1].make_net = None
    nodes[1].cached[1].__dict__["net"] = None
    record = next(rounds)
    assert record.lost[0] == "has no training data"
    assert "failed: " in record.lost[1]


# states on a site's disk


def test_states_are_read_back_and_only_what_the_server_counts_stays(tmp_path: Path) -> None:
    """Rounds 0 to 5, of which 3 was not counted; the server may go back to 2."""
    states = States(tmp_path)
    assert states.get("r", -1) == b""
    for round in range(3):
        states.put("r", round, f"state {round}".encode())
    states.put("r", 3, b"not counted")
    states.settle("r", base=2, keep=1)
    with pytest.raises(Damaged):
        states.get("r", 3)
    with pytest.raises(Damaged):
        states.get("r", 0)
    assert states.get("r", 1) == b"state 1"
    states.put("r", 4, b"state 4")
    states.put("r", 4, b"state 4, once more")
    states.settle("r", base=4, keep=2)
    assert states.get("r", 4) == b"state 4, once more"
    assert states.get("r", 2) == b"state 2"
    with pytest.raises(Damaged):
        states.get("r", 1)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2


def test_a_state_that_was_changed_on_disk_is_not_used(tmp_path: Path) -> None:
    states = States(tmp_path)
    states.put("r", 0, b"whole")
    next(tmp_path.rglob("*.safetensors")).write_bytes(b"other")
    with pytest.raises(Damaged, match="after round 1 of run r is missing or damaged"):
        states.get("r", 0)


def test_a_method_that_pools_data_is_not_deployed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="central trains on all data in one place, but sites keep their data"):
        served(Experiment(Central(), split="iid:clients=3"), tmp_path)


def test_the_figures_of_sites_are_written_for_the_round_they_are_of(tmp_path: Path) -> None:
    """They come with the replies of the next round, and must not count as its own: as in a simulation."""
    what = replace(experiment("fedavg"), data=few_digits(tmp_path))
    list(served(what, tmp_path)[0])
    list(Run(what, out=tmp_path / "alone", workers=1))
    found, expected = (Lines(ClientFigures).read(tmp_path / name / ACCURACY)[1] for name in ("run", "alone"))
    assert [line.round for line in found] == [line.round for line in expected] == list(range(what.rounds))
    assert [line.values for line in found] == [line.values for line in expected]


def test_a_site_s_classes_get_the_run_s_numbers_in_training_and_test_samples() -> None:
    """The site knows b and c as 0 and 1; the run has a, b and c."""
    x, y = np.zeros((3, 2), np.float32), np.array([0, 1, 0])
    data = DataSet("own", x, y, x[:2], np.array([1, 0]), classes=2, labels=("b", "c"))
    found = own.relabelled(data, Task((2,), "float32", ("a", "b", "c"), (), ()))
    assert found.y_train.tolist() == [1, 2, 1]
    assert found.y_test.tolist() == [2, 1]
    assert (found.classes, found.labels) == (3, ("a", "b", "c"))
