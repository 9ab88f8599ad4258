"""CCVR: pooled moments are those of all samples together, features are drawn from them, the head alone is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor
from torch.testing import assert_close

from fedskew.core.fit import Fit
from fedskew.core.method import model_of
from fedskew.core.seeding import one_thread, seeded
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Tensors
from fedskew.core.training import Training
from fedskew.methods import ccvr
from fedskew.methods.ccvr import CALIBRATE, CCVR, MOMENTS, class_moments, pool_moments, sample_features
from fedskew.methods.fedavg import FedAvg
from helpers.nets import normed
from toys import digits, rounds, same

SMALL = CCVR(each=20, epochs=1)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with one_thread():
        yield


def test_moments_pool_without_bias() -> None:
    """{0, 2} at one client, {4} at another: sums 2 and 4, squares 4 and 16. Mean 2, variance (20 - 3 * 4) / 2 = 4."""
    y = torch.zeros(2, dtype=torch.int64)
    first, second = class_moments(tensor([[0.0], [2.0]]), y, 2), class_moments(tensor([[4.0]]), y[:1], 2)
    assert first["count"].tolist() == [2.0, 0.0]
    assert (first["total"].flatten().tolist(), first["square"].flatten().tolist()) == ([2.0, 0.0], [4.0, 0.0])
    assert (second["total"].flatten().tolist(), second["square"].flatten().tolist()) == ([4.0, 0.0], [16.0, 0.0])
    whole = pool_moments([first, second])
    assert whole["count"].tolist() == [3.0, 0.0]
    assert whole["mean"].flatten().tolist() == [2.0, 0.0]
    assert whole["covariance"].flatten().tolist() == [4.0, 0.0]


def test_a_class_of_one_sample_far_from_zero_has_no_covariance() -> None:
    one = class_moments(tensor([[1000.1, -3000.7]]), torch.zeros(1, dtype=torch.int64), 1)
    assert_close(pool_moments([one])["covariance"], torch.zeros(1, 2, 2).double(), atol=1e-8, rtol=0)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31))
def test_pooled_moments_are_those_of_all_samples_however_they_are_split(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    z, y = torch.randn(60, 4, generator=rng) * 3 + 5, torch.randint(5, (60,), generator=rng)
    owner = torch.randint(4, (60,), generator=rng)
    found = pool_moments(class_moments(z[owner == k], y[owner == k], 6) for k in range(4))
    for c in range(5):
        own = z[y == c].double()
        assert int(found["count"][c]) == len(own)
        assert_close(found["mean"][c], own.mean(0), rtol=1e-5, atol=1e-5)
        if len(own) > 1:
            assert_close(found["covariance"][c], torch.cov(own.T), rtol=1e-4, atol=1e-4)


def test_features_are_drawn_from_the_moments_of_classes_that_are_there() -> None:
    covariance = tensor([[2.0, 1.0], [1.0, 3.0]]).double()
    of = Tensors(
        count=tensor([5.0, 0.0, 7.0]).double(),
        mean=tensor([[1.0, -1.0], [9.0, 9.0], [0.0, 4.0]]).double(),
        covariance=torch.stack([covariance, covariance, torch.zeros(2, 2).double()]),
    )
    z, y = sample_features(of, 20000, seeded(0))
    assert y.unique(return_counts=True)[0].tolist() == [0, 2]
    assert y.bincount().tolist() == [20000, 0, 20000]
    assert_close(z[y == 0].mean(0), tensor([1.0, -1.0]), atol=0.05, rtol=0)
    assert_close(torch.cov(z[y == 0].T), covariance.float(), atol=0.1, rtol=0)
    assert_close(z[y == 2], tensor([0.0, 4.0]).expand(20000, 2))


def test_a_covariance_that_rounding_made_indefinite_is_drawn_without_the_bad_direction() -> None:
    of = Tensors(
        count=tensor([2.0]).double(),
        mean=torch.zeros(1, 2).double(),
        covariance=tensor([[[1.0, 0.0], [0.0, -1e-9]]]).double(),
    )
    z, _ = sample_features(of, 100, seeded(0))
    assert z.isfinite().all()
    assert not z[:, 1].any()
    assert float(z[:, 0].std()) == pytest.approx(1, abs=0.2)


def test_training_is_fedavg_s_and_the_last_round_moves_the_head_alone() -> None:
    ours, _ = rounds(normed(SMALL), 2)
    plain, _ = rounds(normed(FedAvg()), 2)
    assert [r.stage for r in ours] == ["train", "train", CALIBRATE]
    for a, b in zip(ours, plain, strict=False):
        assert same(a.server, b.server)
    before, after = ours[1].server, ours[2].server
    assert same({"b": after["buffers"]}, {"b": before["buffers"]})
    moved = {name for name, t in after["parameters"].items() if not torch.equal(t, before["parameters"][name])}
    assert moved == {"head.weight", "head.bias"}


def test_clients_send_the_moments_of_the_final_model_s_features_and_do_not_train() -> None:
    """C (1 + d + d^2) numbers a client: 10 (1 + 16 + 256)."""
    records, simulation = rounds(normed(SMALL), 1)
    server, world = records[0].server, simulation.world
    site = world.site(2, 1, CALIBRATE)
    update, state = world.method.client(site, world.method.broadcast(server), {})
    z = site.infer(site.frozen(model_of(server)).body)
    wanted = class_moments(z, site.data.labels, 10)
    assert all(torch.equal(update.payload[MOMENTS][name], wanted[name]) for name in wanted)
    assert state == {}
    assert records[1].bytes_up == {MOMENTS: 5 * 8 * 10 * (1 + 16 + 256)}


def test_the_head_is_trained_on_drawn_features_as_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the averaged head, without augmentation; the rate is the training's unless given."""
    seen: list[tuple[Site, int, tuple[str, ...]]] = []

    def noted(site: Site, loss: Loss, *, train: str, epochs: int) -> Fit:
        seen.append((replace(site), epochs, (train,)))
        assert_close(site.net.head.weight.detach(), before["parameters"]["head.weight"])
        return Fit(0, 0.0)

    records, simulation = rounds(normed(SMALL), 1)
    before, world = records[0].server, simulation.world
    for method, lr in ((CCVR(each=7, epochs=3), 0.1), (CCVR(each=7, epochs=3, lr=0.5), 0.5)):
        world.training = Training(lr=0.1, augment="flip")
        updates = [method.client(world.site(c, 1, CALIBRATE), before, {})[0] for c in range(5)]
        monkeypatch.setattr(ccvr, "fit", noted)
        torch.nn.init.zeros_(world.net.head.weight)  # a net is scratch: the head is to come from the server's state
        after = method.aggregate(world.server_site(1, CALIBRATE), before, iter(updates))
        monkeypatch.undo()
        assert same(model_of(after), model_of(before))
        site, epochs, train = seen.pop()
        assert (site.training.lr, site.training.augment, epochs, train) == (lr, "", 3, ("head.",))
        assert site.data.labels.bincount().tolist() == [7] * 10


def test_classes_that_the_cohort_lacks_are_not_drawn() -> None:
    records, _ = rounds(digits(SMALL, split="pcdd:clients=5,classes=2", hidden="12"), 1, cohorts=[[0, 1], [1]])
    assert all(t.isfinite().all() for t in records[-1].server["parameters"].values())


def test_calibration_improves_accuracy_under_label_skew() -> None:
    """Two classes a client: the mean of heads knows less than features do."""
    training = Training(lr=0.1, batch_size=16, epochs=5)
    world = digits(CCVR(each=100), split="pcdd:clients=5,classes=2", training=training)
    records, simulation = rounds(world, 3)
    scores = [simulation.evaluate(0, world.method.broadcast(r.server)).global_.accuracy for r in records[-2:]]
    assert scores[1] > scores[0] + 0.05
