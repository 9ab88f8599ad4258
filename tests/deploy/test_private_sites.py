"""Differential privacy between sites, and a site that bounds its own updates (`clip` of its policy)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import tensor

from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload, Tensors
from fedskew.deploy.flower.frames import Header
from fedskew.deploy.policy import Policy, read_policy
from fedskew.experiment.config import Experiment, from_dict
from fedskew.experiment.run import Run
from fedskew.experiment.run_directory import read_run
from fedskew.federation import private
from fedskew.federation.accounting import spent
from fedskew.federation.private import flat, scaled, shortened
from fedskew.federation.wire import decode, encode
from sites import few_digits, nodes_in, served

pytestmark = pytest.mark.slow  # dozens of small federations

pytest.importorskip("dp_accounting")
NOISE = {"noise": 0.5, "clip": 0.5}


def experiment(folder: Path, method: str = "fedavg", **more: Any) -> Experiment:
    values = {"method": method, "data": few_digits(folder), "split": "iid:clients=3", "model": "mlp:hidden=8"}
    return from_dict(values | {"rounds": 2, "trouble": {"quorum": 2}, "privacy": NOISE} | more)


def between_sites(folder: Path, what: Experiment, policy: Policy | None = None, **options: Any) -> Any:
    """A finished run between three sites, of which the first has the policy."""
    data = str(what.data)
    nodes = [nodes_in(folder, data, policy)[0], *nodes_in(folder, data)[1:]]
    between, played = served(what, folder, nodes=nodes, **options)
    list(between)
    return between, played


def test_two_servers_with_the_same_seed_add_different_noise_and_two_simulations_the_same(tmp_path: Path) -> None:
    what = experiment(tmp_path)
    served_twice = [between_sites(tmp_path / name, what)[0].result.digest for name in ("one", "two")]
    simulated = []
    for _ in range(2):
        run = Run(what)
        list(run)
        assert run.result is not None
        simulated.append(run.result.digest)
    assert simulated[0] == simulated[1]
    assert len({*served_twice, *simulated}) == 3


def test_without_noise_two_servers_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the difference above is the noise and nothing else. The noise that is asked for has one value a parameter."""
    asked = []

    def nothing(n: int) -> torch.Tensor:
        asked.append(n)
        return torch.zeros(n)

    monkeypatch.setattr(private, "system_noise", nothing)
    what = experiment(tmp_path)
    one, two = (between_sites(tmp_path / name, what)[0] for name in ("one", "two"))
    assert one.result.digest == two.result.digest
    size = sum(t.numel() for t in decode((one.path / "model.safetensors").read_bytes())["parameters"].values())
    assert asked == [size] * 4  # two runs of two rounds


def test_the_noise_between_sites_is_the_operating_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    original = private.os.urandom
    monkeypatch.setattr(private.os, "urandom", lambda n: drawn.append(n) or original(n))
    between_sites(tmp_path, experiment(tmp_path))
    assert len([n for n in drawn if n > 1000]) == 2


def test_every_record_between_sites_has_the_epsilon_of_its_rounds(tmp_path: Path) -> None:
    """2 of 3 sites are drawn, but sites know the seed that draws: it counts as if all took part."""
    between, _ = between_sites(tmp_path, experiment(tmp_path, clients_per_round=2))
    expected = [spent(0.5, n, 3, 3, 1e-5) for n in (1, 2)]
    assert [record.epsilon for record in read_run(tmp_path / "run").records] == expected
    assert between.result.epsilon == expected[-1]


def test_a_budget_between_sites_is_kept(tmp_path: Path) -> None:
    between, _ = between_sites(tmp_path, experiment(tmp_path, privacy={"epsilon": 20.0, "clip": 0.5}))
    assert 19.9 < between.result.epsilon <= 20


@pytest.mark.parametrize("privacy", [NOISE, {"epsilon": 20.0, "clip": 0.5}], ids=["noise", "budget"])
def test_a_round_that_is_repeated_with_new_noise_counts_twice(
    tmp_path: Path, privacy: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint of round 2 is torn, so the resumed server repeats it: four noisy sums for three rounds."""
    what = experiment(tmp_path, rounds=3, privacy=privacy)
    first, _ = served(what, tmp_path)
    steps = iter(first)
    before = [next(steps).epsilon, next(steps).epsilon]
    first.directory.close()
    newest = first.directory.checkpoints()[0]
    newest.write_bytes(newest.read_bytes()[:-1])
    again, _ = served(what, tmp_path, resume=True)
    after = [record.epsilon for record in again]
    assert len(after) == 2
    assert after[0] > before[1]
    assert "1 noisy sums were released of rounds that are repeated" in caplog.text
    if "noise" in privacy:
        assert after == [spent(0.5, n, 3, 3, 1e-5) for n in (3, 4)]
    else:
        assert after[-1] <= 20
    assert again.result.epsilon == after[-1]


def test_a_site_cannot_be_more_than_its_share_of_a_private_sum(tmp_path: Path) -> None:
    """A hostile site sends a hundred times its change: it is clipped at the server, and moves the mean by C / 3."""

    def spoil(place: int, ask: Header, answer: Header, payload: bytes) -> tuple[Header, bytes]:
        if place == 0 and ask["kind"] == "work" and ask["train"]:
            update = decode(bytearray(payload))
            update["parameters"] = update["parameters"] * 100.0
            return answer, bytes(encode(update))
        return answer, payload

    what = experiment(tmp_path, rounds=1, privacy={"noise": 1e-9, "clip": 0.5})
    plain, _ = between_sites(tmp_path / "plain", what)
    spoilt, _ = between_sites(tmp_path / "spoilt", what, spoil=spoil)
    a, b = (flat(decode((one.path / "server.safetensors").read_bytes())) for one in (plain, spoilt))
    assert 0 < float((a - b).norm()) <= 2 * 0.5 / 3 + 1e-4


# a site's own bound


def test_an_update_is_shortened_to_the_bound_of_the_site_by_hand() -> None:
    """Change (3, 0), control 4: the norm is 5. To the bound 1: change (.6, 0), control .8."""
    x: Payload = {"parameters": Tensors(w=tensor([1.0, 1.0]))}
    update: Payload = {"parameters": Tensors(w=tensor([4.0, 1.0])), "control": Tensors(c=tensor([4.0]))}
    made, norm = shortened(update, x, 1.0)
    assert norm == pytest.approx(5.0)
    assert made["parameters"]["w"].tolist() == pytest.approx([1.6, 1.0])
    assert made["control"]["c"].tolist() == pytest.approx([0.8])
    assert shortened(update, x, 5.1)[0] is update


@pytest.mark.parametrize("privacy", [{}, NOISE], ids=["plain", "private"])
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_what_leaves_a_site_is_within_its_bound_whatever_the_server_asks(
    tmp_path: Path, method: str, privacy: dict[str, float]
) -> None:
    norms: dict[int, list[float]] = {0: [], 1: []}
    said: list[str] = []
    broadcast: list[Payload] = []

    def spoil(place: int, ask: Header, answer: Header, payload: bytes) -> tuple[Header, bytes]:
        if place < 2 and ask["kind"] == "work" and ask["train"] and ask["round"] == 0:
            sent = decode(bytearray(payload))
            norms[place].append(float(flat(scaled(sent, broadcast[0])).norm()))
        return answer, payload

    what = experiment(tmp_path, method, privacy=privacy, rounds=1)
    assert what.privacy.clip > 0.05
    nodes = [nodes_in(tmp_path, policy=Policy(clip=0.05))[0], *nodes_in(tmp_path)[1:]]
    between, played = served(what, tmp_path, nodes=nodes, said=said, spoil=spoil)
    first = what.method.init_server(between.assembled.world.server_site(0, "init"))
    broadcast.append(what.method.broadcast(first))
    list(between)
    assert norms[0] == [pytest.approx(0.05, rel=1e-3)]
    assert norms[1][0] > 0.1
    assert between.records[0].trained == [0, 1, 2]
    assert said.count("note: site north shortens its updates to a bound of its own: results depend on it") == 1
    assert any("at most 0.05 left" in note for note in played.nodes[0].notes)


def test_a_bound_that_is_not_reached_changes_nothing(tmp_path: Path) -> None:
    what, said = experiment(tmp_path, privacy={}), list[str]()
    plain, _ = between_sites(tmp_path / "plain", what)
    bounded, _ = between_sites(tmp_path / "bounded", what, Policy(clip=1e6), said=said)
    assert plain.result.digest == bounded.result.digest
    assert not any("shortens" in line for line in said)


@pytest.mark.parametrize(
    ("method", "more", "words"),
    [
        ("fedmr", {}, "prototypes/"),
        ("fedavg", {"model": "resnet8"}, "buffers/"),
    ],
)
def test_what_cannot_be_shortened_is_refused_before_it_is_trained(
    tmp_path: Path, method: str, more: dict[str, Any], words: str
) -> None:
    between, _ = between_sites(tmp_path, experiment(tmp_path, method, privacy={}, rounds=1, **more), Policy(clip=1.0))
    why = between.records[0].lost[0]
    assert why.startswith("cannot take part: this site bounds updates to the norm 1, but updates have ")
    assert words in why
    assert between.records[0].trained == [1, 2]
    assert not list((tmp_path / "north").glob("**/*.safetensors"))


def test_the_bound_is_a_key_of_the_policy_file(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text("clip = 0.5\n")
    assert read_policy(path).clip == 0.5
    for wrong in ("clip = 0", "clip = -1", 'clip = "much"', "clip = nan"):
        path.write_text(wrong)
        with pytest.raises(UsageError, match="clip"):
            read_policy(path)
