"""A hostile server finds nothing at a site, and a hostile site changes nothing but its own part."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedskew.core.settings import UsageError
from fedskew.core.tensors import Tensors
from fedskew.core.training import Training
from fedskew.data.sources.loading import load
from fedskew.deploy import node as node_module
from fedskew.deploy.flower.frames import Header
from fedskew.deploy.limits import TimeIsUp, time_limit
from fedskew.deploy.messages import Request, as_header
from fedskew.deploy.node import Node
from fedskew.deploy.policy import Policy, fingerprint, parse_allowed
from fedskew.deploy.states import States
from fedskew.experiment.config import Experiment
from fedskew.experiment.run_directory import read_run
from fedskew.federation.robust import Robust
from fedskew.federation.wire import decode, encode
from fedskew.methods import REGISTRY
from sites import NAMES, few_digits, nodes_in, served

pytestmark = pytest.mark.slow  # dozens of small federations

SPLIT = "iid:clients=3"
FEDAVG = REGISTRY["fedavg"]()


def experiment(**changes: Any) -> Experiment:
    return replace(Experiment(method=FEDAVG, split=SPLIT, rounds=2, training=Training(batch_size=64)), **changes)


def ask(settings: Header, **changes: Any) -> Header:
    given = as_header(Request("work", "0123456789abcdef", changes.pop("data", "digits"), settings=settings)) | changes
    return dict(json.loads(json.dumps(given)))


# a hostile server


def test_a_site_loads_only_what_its_own_data_option_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request's settings name another file, and a public set in a third; the site trains on neither."""
    own, other = few_digits(tmp_path), tmp_path / "other.npz"
    np.savez(other, x_train=np.zeros((9, 8, 8, 1), np.uint8), y_train=np.arange(9))
    opened: list[str] = []
    monkeypatch.setattr(node_module, "load", lambda name, folder: opened.append(name) or load(name, folder))
    site = Node(own, States(tmp_path / "state"), name="north")
    settings = experiment(data=str(other), public=str(tmp_path / "third.npz")).as_dict()
    request = ask(settings, data=own, client=0, sites=3, train=True, round=0)
    answer, _ = site.reply(request, bytes(encode({})))
    assert "its initial model differs" in answer.lost  # it got as far as its own world
    assert opened == [own]
    assert str(tmp_path) not in answer.lost


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"training": {"epochs": 10**9}}, "training.epochs=1000000000 is more than the 1000"),
        ({"training": {"steps": 10**9}}, "training.steps=1000000000 is more than"),
        ({"rounds": 10**6}, "rounds=1000000 is more than"),
        ({"model": "mlp:hidden=90000-90000"}, "parameters, more than the"),
        ({"model": "mlp:hidden=1000000000"}, "model has a number above"),
        ({"split": "iid:clients=1000000000"}, "split has a number above"),
        ({"split": "iid:clients=4"}, "the split has 4 clients"),
        ({"method": {"name": "vhl", "n_v": 10**9}}, "method.n_v=1000000000 is more than the 100000"),
        ({"method": {"name": "finetune", "epochs": 10**5}}, "method.epochs=100000 is more than the 1000"),
        ({"method": {"name": "fedcrc", "epochs": [1, 1, 10**5]}}, "method.epochs=100000 is more than the 1000"),
        ({"method": {"name": "nosuch"}}, "unknown method 'nosuch'"),
        ({"model": {"a": {"b": {"c": {"d": 1}}}}}, "nested deeper"),
        ({"surprise": 1}, "unknown setting 'surprise'"),
    ],
)
def test_a_site_refuses_what_is_beyond_its_limits(change: Header, words: str, tmp_path: Path) -> None:
    site = Node("digits", States(tmp_path), name="north")
    settings = {"method": {"name": "fedavg"}, "split": SPLIT} | change
    answer, payload = site.reply(ask(settings, client=0, sites=3, train=True, round=0), bytes(encode({})))
    assert words in answer.lost
    assert payload == b""


@pytest.mark.parametrize("change", [{"round": 2}, {"round": 10**5}, {"round": 1, "evaluate_round": 2}])
def test_a_site_carries_out_no_more_rounds_than_it_agreed_to(change: Header, tmp_path: Path) -> None:
    between, played = served(experiment(), tmp_path)
    list(between)
    last = next(request for place, request in reversed(played.asked) if request["kind"] == "work" and place == 0)
    answer, payload = played.nodes[0].reply(last | {"train": True, "base": -1} | change, bytes(encode({})))
    assert "the experiment has 2 rounds" in answer.lost
    assert payload == b""


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"x": value}
    return value


@pytest.mark.parametrize(
    "change",
    [
        {"task": {"shape": [-1, 8, 1], "kind": "uint8", "labels": ["0", "1"], "mean": [0.1], "std": [0.1]}},
        {"task": {"shape": [8] * 50, "kind": "uint8", "labels": ["0", "1"], "mean": [0.1], "std": [0.1]}},
        {"task": {"shape": [8, 8, 1], "kind": "object", "labels": ["0"], "mean": [0.1], "std": [0.1]}},
        {"client": -5},
        {"sites": 10**12},
        {"round": 10**12},
        {"run": "../../etc"},
        {"kind": "shutdown"},
        {"settings": 5},
        {"settings": deep(500)},
        {"settings": {}},
        {"stage": "x" * 10**6},
    ],
)
def test_any_nonsense_from_a_server_is_a_refusal(change: Header, tmp_path: Path) -> None:
    site = Node("digits", States(tmp_path), name="north")
    header = ask({"method": {"name": "fedavg"}, "split": SPLIT}, data="sites") | change
    answer, payload = site.reply(header, bytes(encode({})))
    assert answer.lost.startswith("cannot take part: ")
    assert len(answer.lost) < 400
    assert payload == b""


def test_an_error_that_nobody_foresaw_is_a_refusal_without_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any, **more: Any) -> None:
        raise MemoryError("/secret/folder is full")

    site = Node("digits", States(tmp_path), name="north")
    monkeypatch.setattr(node_module, "load", broken)
    answer, _ = site.reply(ask({"method": {"name": "fedavg"}, "split": SPLIT}, kind="hello"), b"")
    assert answer.lost == "cannot take part: its log has the reason (MemoryError)"
    assert any("/secret/folder" in note for note in site.notes)


def test_an_error_in_training_is_reported_without_its_text(tmp_path: Path) -> None:
    between, played = served(experiment(), tmp_path)
    rounds = iter(between)
    next(rounds)

    def fail(*given: Any, **more: Any) -> None:
        raise OSError("/secret/folder")

    played.nodes[1].cached[1].train_client = fail  # type: ignore[index, method-assign, union-attr]
    assert next(rounds).lost == {1: "failed: OSError"}


def test_work_that_takes_too_long_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`except Exception` inside the work does not keep it going."""
    site = Node("digits", States(tmp_path), name="north", policy=Policy(seconds=0.05))

    def endless(*given: Any) -> None:
        while True:
            try:
                time.sleep(10)
            except Exception:
                continue

    monkeypatch.setattr(site, "_answer", endless)
    answer, _ = site.reply(ask({"method": {"name": "fedavg"}}, kind="hello"), b"")
    assert answer.lost == "took longer than the 0.05 s that this site allows"
    with pytest.raises(TimeIsUp), time_limit(0.01):
        time.sleep(10)
    with time_limit(0.01):
        pass
    time.sleep(0.03)  # the alarm is off


def test_an_infinite_time_is_a_limit_that_is_never_reached() -> None:
    """`seconds = inf` in a policy is meant as no limit, not as a site that refuses everything."""
    with time_limit(float("inf")):
        pass


def test_a_server_cannot_make_a_site_import_a_file(tmp_path: Path) -> None:
    """A file of the site's own is code that runs when it is imported: only its operator names it."""
    trap = tmp_path / "trap.py"
    trap.write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    site = Node("digits", States(tmp_path / "state"), name="north")
    for settings in (
        {"method": {"name": f"{trap}:Evil"}},
        {"model": f"{trap}:Net"},
        {"model": f"{trap}:Net:x=1"},
        {"evaluation": {"metric": f"{trap}:m"}},
    ):
        for kind in ("hello", "work"):
            answer, _ = site.reply(ask(settings, kind=kind, client=0, sites=3), bytes(encode({})))
            assert "names code in a file" in answer.lost
    assert not (tmp_path / "sprung").exists()
    trap.write_text("from torch import nn\ndef net(shape, classes):\n    return nn.Linear(64, classes)\n")
    policy = parse_allowed([f"model={trap}:net"])
    allowed = Node("digits", States(tmp_path / "other"), name="north", policy=policy)
    assert allowed.reply(ask({"model": f"{trap}:net"}, kind="hello"), b"")[0].lost == ""


# consent


def hello(settings: Header) -> Header:
    return ask(settings, kind="hello")


def test_a_site_agrees_once_to_one_experiment_and_to_no_other(tmp_path: Path) -> None:
    first, second = ({"method": {"name": "fedavg"}, "split": SPLIT, "seed": seed} for seed in (1, 2))
    site = Node("digits", States(tmp_path), name="north")
    assert site.reply(hello(first), b"")[0].lost == ""
    assert f"serves experiment {fingerprint(first)}: fedavg, 30 rounds" in site.notes[0]
    again = Node("digits", States(tmp_path), name="north")  # restarted
    assert again.reply(hello(first), b"")[0].lost == ""
    assert again.notes == []
    refused = again.reply(hello(second), b"")[0]
    assert f"--accept {fingerprint(second)}" in refused.lost
    assert refused.facts is None
    agreed = Node("digits", States(tmp_path), policy=Policy(experiments=frozenset({fingerprint(second)})))
    assert agreed.reply(hello(second), b"")[0].lost == ""
    assert Node("digits", States(tmp_path)).reply(hello(second), b"")[0].lost == ""  # kept


def test_a_site_with_a_list_of_methods_serves_these_and_no_others(tmp_path: Path) -> None:
    site = Node("digits", States(tmp_path), policy=parse_allowed(["method=fedavg,fedcrc"]))
    for name, fine in (("fedavg", True), ("fedcrc", True), ("scaffold", False)):
        answer, _ = site.reply(hello({"method": {"name": name}, "split": SPLIT}), b"")
        assert (answer.lost == "") is fine
    assert "this site serves only the methods fedavg, fedcrc, not scaffold" in answer.lost
    for text, words in (("fedavg", "expected method="), ("method=nosuch", "unknown method 'nosuch'")):
        with pytest.raises(UsageError, match=words):
            parse_allowed([text])


def test_a_site_that_waits_for_one_experiment_does_not_take_the_first_that_comes(tmp_path: Path) -> None:
    site = Node("digits", States(tmp_path), policy=Policy(experiments=frozenset({"0" * 16})))
    assert "has not agreed" in site.reply(hello({"method": {"name": "fedavg"}}), b"")[0].lost


def test_a_server_that_is_restarted_with_another_experiment_is_not_served(tmp_path: Path) -> None:
    nodes, said = nodes_in(tmp_path), list[str]()
    list(served(experiment(), tmp_path, nodes=nodes)[0])
    (tmp_path / "b").mkdir()
    other = experiment(data=few_digits(tmp_path), seed=5)
    between, _ = served(other, tmp_path / "b", nodes=nodes, said=said)
    with pytest.raises(RuntimeError, match="0 of 3 sites joined"):
        list(between)
    assert any("has not agreed to this experiment" in line for line in said)


# a hostile site


def spoiled(tmp_path: Path, change: Any, **hosting: Any) -> tuple[list[Any], list[str]]:
    """Records of a run in which `change(ask, answer, payload)` replaces the replies of the third site."""
    said: list[str] = []

    def spoil(place: int, ask: Header, answer: Header, payload: bytes) -> tuple[Header, bytes] | None:
        return change(ask, answer, payload) if place == 2 else (answer, payload)

    between, _ = served(experiment(), tmp_path, spoil=spoil, said=said, **hosting)
    return list(between), said


def work(change: Header) -> Any:
    return lambda ask, answer, payload: (answer | change if ask["kind"] == "work" else answer, payload)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": 1e300}, "sent the weight 1e+300, but has"),
        ({"weight": -1.0}, "sent the weight -1.0"),
        ({"run": "00"}, "of another request: ignored"),
        ({"round": 7}, "answered round 8 of another request: ignored"),
        ({"lost": "x\x1b[2J\nround 2/2: accuracy 99 %"}, "x?[2J?round 2/2: accuracy 99 %"),
        ({"lost": "y" * 1500}, "yyy..."),
        ({"metrics": {"\x1b[31m" * 5: float("nan")}}, "not finite as ?[31m"),
    ],
)
def test_a_reply_that_is_not_true_is_left_out(change: Header, words: str, tmp_path: Path) -> None:
    records, _ = spoiled(tmp_path, work(change))
    for record in records:
        assert words in record.lost[2]
        assert record.trained == [0, 1]
        assert "\x1b" not in json.dumps(record.as_dict(), ensure_ascii=False)


def scaled(factor: float) -> Any:
    def change(ask: Header, answer: Header, payload: bytes) -> tuple[Header, bytes]:
        if ask["kind"] == "work" and ask["train"]:
            update = decode(bytearray(payload))
            payload = bytes(encode({g: Tensors({n: t * factor for n, t in ts.items()}) for g, ts in update.items()}))
        return answer, payload

    return change


@pytest.mark.parametrize("change", [{"metrics": {"loss": 1e308}}, {"seconds": 1.7e308}], ids=["loss", "seconds"])
def test_figures_whose_sum_would_overflow_do_not_end_the_run_or_spoil_its_records(
    change: Header, tmp_path: Path
) -> None:
    """A loss of 1e308 times a weight is infinite, and would count as divergence."""
    records, _ = spoiled(tmp_path, work(change))
    assert [record.trained for record in records] == [[0, 1], [0, 1]]
    assert all("above 1e+30" in record.lost[2] for record in records)
    assert len(read_run(tmp_path / "run").records) == 2


def reordered(ask: Header, answer: Header, payload: bytes) -> tuple[Header, bytes]:
    """The same update with its tensors in the opposite order."""
    if not payload:
        return answer, payload
    update = decode(bytearray(payload))
    return answer, bytes(encode({g: Tensors(reversed(ts.items())) for g, ts in reversed(update.items())}))


@pytest.mark.parametrize("rule", [{}, {"robust": Robust("median", attackers=1)}], ids=["mean", "median"])
def test_the_order_in_which_a_site_sends_its_tensors_changes_nothing(rule: Any, tmp_path: Path) -> None:
    """Rules on whole vectors go by place: the first site would otherwise decide where the others' values go."""
    digests = []
    for place, change in enumerate((None, reordered)):

        def spoil(site: int, ask: Header, answer: Header, payload: bytes, change: Any = change) -> Any:
            return change(ask, answer, payload) if change is not None and site == 0 else (answer, payload)

        between, _ = served(experiment(**rule), tmp_path / str(place), spoil=spoil)
        list(between)
        digests.append(between.result.model_digest)
    assert digests[0] == digests[1]


def test_an_update_of_a_huge_norm_is_left_out_and_the_site_named(tmp_path: Path) -> None:
    records, _ = spoiled(tmp_path, scaled(1e30))
    assert all("more than 1000 times the usual" in record.lost[2] for record in records)
    assert all(record.trained == [0, 1] for record in records)
    records, _ = spoiled(tmp_path / "b", scaled(30.0))
    assert all(record.lost == {} for record in records)
    records, _ = spoiled(tmp_path / "c", scaled(1e4), norm_bound=0.0)
    assert records[0].lost == {}


def test_many_empty_tensors_are_refused_before_they_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def many(ask: Header, answer: Header, payload: bytes) -> tuple[Header, bytes]:
        empty = torch.zeros(0)
        return answer, bytes(encode({"g": Tensors({str(i): empty for i in range(2000)})})) if payload else payload

    records, _ = spoiled(tmp_path, many)
    assert all("sent an invalid reply" in record.lost[2] for record in records)


def facts(change: Header) -> Any:
    def spoil(ask: Header, answer: Header, payload: bytes) -> tuple[Header, bytes]:
        return (answer | {"facts": answer["facts"] | change} if ask["kind"] == "hello" else answer), payload

    return spoil


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"samples": -1}, "Expected `int` >= 0"),
        ({"samples": "many"}, "Expected `int`"),
        ({"samples": 10**30}, "sent an invalid reply"),
        ({"samples": 0}, "reported no training samples"),
        ({"labels": ["0", "0"]}, "one of them twice"),
        ({"labels": ["0", "1\x1b[2J"]}, "unprintable name (1?[2J)"),
        ({"labels": ["1" * 1000]}, "Expected `str` of length <= 200"),
        ({"labels": [str(n) for n in range(10_001)]}, "Expected `array` of length <= 10000"),
        ({"pixels": 1}, "reported 1 pixels"),
        ({"sums": [-1]}, "Expected `int` >= 0"),
        ({"sums": []}, "with sums of 0 channels"),
        ({"squares": [0]}, "sums that no pixels have"),
        ({"shape": [8, 8]}, "reported images of shape [8, 8]"),
        ({"shape": [0, 8, 1]}, "Expected `int` >= 1"),
        ({"shape": [4, 4, 1]}, "pixels for"),
        ({"kind": "object"}, "Invalid enum value"),
    ],
)
def test_facts_that_cannot_be_true_leave_out_the_site_and_the_run_goes_on(
    change: Header, words: str, tmp_path: Path
) -> None:
    said: list[str] = []
    paths = own_data(tmp_path)
    between, _ = served(
        experiment(data="sites"),
        tmp_path,
        nodes=nodes_in(tmp_path, paths),
        spoil=lambda place, *given: facts(change)(*given) if place == 2 else given[1:],
        said=said,
    )
    record = next(iter(between))
    assert record.trained == [0, 1]
    assert any(line.startswith(f"warning: site {NAMES[2]} ") and words in line for line in said)


def own_data(folder: Path) -> list[str]:
    data = load("digits")
    paths = [str(folder / f"{name}.npz") for name in NAMES]
    for place, path in enumerate(paths):
        mine = slice(100 * place, 100 * place + 100)
        np.savez(path, x_train=data.x_train[mine], y_train=data.y_train[mine])
    return paths


def test_a_site_whose_samples_have_another_shape_is_left_out(tmp_path: Path) -> None:
    paths, said = own_data(tmp_path), list[str]()
    np.savez(paths[1], x_train=np.zeros((20, 9, 9), np.uint8), y_train=np.arange(20) % 2)
    between, _ = served(experiment(data="sites"), tmp_path, nodes=nodes_in(tmp_path, paths), said=said)
    record = next(iter(between))
    assert record.trained == [0, 2]
    assert any("site south has samples of uint8[9, 9, 1]" in line for line in said)


def test_a_name_that_would_forge_a_line_is_refused(tmp_path: Path) -> None:
    said: list[str] = []
    nodes = nodes_in(tmp_path)
    nodes[1].name = "so\nuth"
    between, _ = served(experiment(), tmp_path, nodes=nodes, said=said, open=True, patience=0.3)
    with pytest.raises(UsageError, match="2 of 3 sites joined"):
        list(between)
    assert any("has the name 'so?uth'" in line for line in said)


# time


def test_a_site_that_needs_long_to_load_its_data_takes_part_as_soon_as_it_can(tmp_path: Path) -> None:
    """Its first answer comes only after the second round began: until then it misses rounds, then it trains."""
    said, held = list[str](), list[tuple[Header, bytes]]()

    def slow(place: int, ask: Header, answer: Header, payload: bytes) -> tuple[Header, bytes] | None:
        if place == 2 and ask["kind"] == "hello":
            return None
        return None if place == 2 and ask["round"] == 0 else (answer, payload)

    between, _ = served(experiment(rounds=3), tmp_path, spoil=slow, said=said, patience=0.2, timeout=0.3)
    records = list(between)
    assert [record.trained for record in records] == [[0, 1], [0, 1, 2], [0, 1, 2]]
    assert between.absent() == []
    assert held == []


def test_sites_that_never_took_part_are_named_at_the_end(tmp_path: Path) -> None:
    between, _ = served(
        experiment(),
        tmp_path,
        spoil=lambda place, ask, answer, payload: None if place == 1 else (answer, payload),
        patience=0.2,
        timeout=0.2,
    )
    list(between)
    assert between.absent() == ["south"]


def test_a_site_with_a_damaged_state_can_go_on_without_it(tmp_path: Path) -> None:
    scaffold = experiment(method=REGISTRY["scaffold"](), rounds=3)
    nodes = nodes_in(tmp_path)
    between, _ = served(scaffold, tmp_path, nodes=nodes)
    rounds = iter(between)
    next(rounds)
    for path in (tmp_path / NAMES[2]).rglob("*.safetensors"):
        path.write_bytes(b"damaged")
    assert "fedskew join --fresh-state" in next(rounds).lost[2]
    nodes[2].states = States(tmp_path / NAMES[2], fresh=True)
    assert next(rounds).lost == {}


# what left a site


def test_a_site_records_what_leaves_it(tmp_path: Path) -> None:
    between, played = served(experiment(rounds=1), tmp_path)
    list(between)
    site = played.nodes[0]
    request = next(ask for place, ask in played.asked if place == 0 and ask["kind"] == "work")
    answer, payload = site.reply(request, bytes(encode(between.experiment.method.broadcast(_server(between)))))
    site.audit.record("here:1", "work", answer, payload)
    (line,) = site.audit.path.read_text().splitlines()
    entry = json.loads(line)
    assert entry["groups"] == {"parameters": 4 * sum(t.numel() for t in decode(payload)["parameters"].values())} | (
        {"buffers": 0} if "buffers" in decode(payload) else {}
    )
    assert entry["bytes"] == len(payload)
    assert (entry["server"], entry["kind"], entry["round"]) == ("here:1", "work", 0)
    assert set(entry["told"]) == {"weight", "metrics", "seconds"}
    assert site.audit.path.stat().st_mode & 0o077 == 0


def _server(between: Any) -> Any:
    return decode((between.path / "server.safetensors").read_bytes())
