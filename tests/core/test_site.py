"""`fit` and what it stands on: batches, seeds, optimisers, batch norm."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedskew.core.fit import batches, fit
from fedskew.core.losses import Corrected
from fedskew.core.net import Net
from fedskew.core.samples import Data
from fedskew.core.seeding import seeded
from fedskew.core.site import Site
from fedskew.core.tensors import Payload
from fedskew.core.training import Training
from fedskew.methods.fedavg import FedAvg
from toys import digits, same

close = torch.testing.assert_close


def normed(classes: int = 3) -> Net:
    """A small net with running statistics in its body."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU()), nn.Linear(5, classes), 5)


def place(n: int = 20, *, net: Any = None, training: Training | None = None, **options: Any) -> Site:
    rng = seeded(1)
    data = Data(torch.randn(n, 4, generator=rng), torch.arange(n) % 3, torch.arange(n))
    site = Site(net or normed(), data, training or Training(batch_size=8), 3, 1, {}, seeded(2), **options)
    site.initial = site.model()
    return site


def sizes(site: Site, training: Training, **length: int) -> list[int]:
    return [len(y) for _, y in batches(site, training, **length)]


def plain_net() -> Net:
    return Net(nn.Sequential(nn.Linear(4, 5), nn.ReLU()), nn.Linear(5, 3), 5)


def test_every_sample_comes_once_a_pass_in_a_new_order() -> None:
    site = place(20, net=plain_net())
    got = [y for x, y in batches(site, Training(batch_size=20, epochs=2))]
    assert all(torch.equal(torch.bincount(y), torch.bincount(site.data.labels)) for y in got)
    assert not torch.equal(got[0], got[1])


def test_the_last_batch_is_smaller_or_dropped_if_there_is_a_whole_one() -> None:
    net = plain_net()
    assert sizes(place(20, net=net), Training(batch_size=8)) == [8, 8, 4]
    assert sizes(place(20, net=net), Training(batch_size=8, drop_last=True)) == [8, 8]
    assert sizes(place(5, net=net), Training(batch_size=8, drop_last=True)) == [5]


def test_steps_take_the_place_of_epochs_and_go_on_over_passes() -> None:
    site = place(10, net=plain_net())
    assert sizes(site, Training(batch_size=4, steps=5)) == [4, 4, 2, 4, 4]
    assert sizes(site, Training(batch_size=4), steps=1) == [4]
    assert sizes(site, Training(batch_size=4), epochs=0) == []


def test_a_lone_sample_joins_the_batch_before_it_where_there_is_batch_norm() -> None:
    assert sizes(place(17), Training(batch_size=8)) == [8, 9]
    assert sizes(place(17, net=plain_net()), Training(batch_size=8)) == [8, 8, 1]
    assert sizes(place(1), Training(batch_size=8)) == [2]
    assert sizes(place(9), Training(batch_size=8, drop_last=True)) == [8]


def test_a_client_with_one_sample_trains_with_batch_norm() -> None:
    site = place(1)
    assert fit(site, site.loss).steps == 1
    assert all(t.isfinite().all() for t in site.parameters().values())


def test_the_loss_of_a_fit_is_the_mean_over_its_steps() -> None:
    """With steps too small to move anything, two batches of eight have the loss of all sixteen samples."""
    site = place(16, net=plain_net(), training=Training(lr=1e-9, batch_size=8))
    x, y = site.data.take(torch.arange(16))
    assert fit(site, site.loss) == (2, pytest.approx(site.loss(site.net, x, y).item()))


def test_a_site_without_data_does_nothing() -> None:
    site = place(0)
    before = site.model()
    assert fit(site, site.loss) == (0, 0.0)
    assert same(site.model(), before)


def test_the_same_seed_gives_the_same_bits_and_another_does_not() -> None:
    def after(key: int) -> Payload:
        site = place()
        site.rng = seeded(key)
        fit(site, site.loss, epochs=2)
        return site.model()

    assert same(after(5), after(5))
    assert not same(after(5), after(6))


def test_fit_neither_reads_nor_moves_the_global_generator() -> None:
    def after(state: int) -> Payload:
        net = Net(nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5)), nn.Linear(5, 3), 5)
        with torch.no_grad():
            for p in net.parameters():
                p.fill_(0.1)
        site = place(net=net)
        torch.manual_seed(state)
        before = torch.get_rng_state()
        fit(site, site.loss)
        assert torch.equal(torch.get_rng_state(), before)
        return site.model()

    assert same(after(1), after(2))


def reference(training: Training, loss: Callable[..., Tensor]) -> Payload:
    """The plain loop anyone would write."""
    site = place(training=training)
    if training.optimiser == "adam":
        optimiser: Any = torch.optim.Adam(site.net.parameters(), lr=training.lr, weight_decay=training.weight_decay)
    else:
        optimiser = torch.optim.SGD(
            site.net.parameters(), lr=training.lr, momentum=training.momentum, weight_decay=training.weight_decay
        )
    torch.randint(1 << 62, (), generator=site.rng)  # fit's own draw
    site.net.train()
    for x, y in batches(site, training):
        optimiser.zero_grad()
        loss(site.net, x, y).backward()
        if training.clip is not None:
            nn.utils.clip_grad_norm_(site.net.parameters(), training.clip)
        optimiser.step()
    return site.model()


@pytest.mark.parametrize(
    "training",
    [
        Training(lr=0.1, batch_size=8, epochs=3),
        Training(lr=0.1, batch_size=8, epochs=3, momentum=0.9, weight_decay=0.01),
        Training(lr=0.1, batch_size=8, epochs=2, clip=0.05, momentum=0.5),
        Training(lr=0.1, batch_size=8, epochs=2, clip=1000.0),
        Training(optimiser="adam", lr=0.01, batch_size=8, epochs=2, weight_decay=0.1),
    ],
    ids=["sgd", "momentum+decay", "clip", "clip nothing", "adam"],
)
@pytest.mark.parametrize("fast", [True, False])
def test_fit_is_the_plain_loop(training: Training, fast: bool) -> None:
    site = place(training=training, fast=fast)
    fit(site, site.loss)
    expected = reference(training, site.loss)
    for group in expected:
        for name, t in expected[group].items():
            close(site.model()[group][name], t, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("train", "still"), [("head.", "body."), ("body.", "head.")])
def test_what_is_not_trained_keeps_its_bits_statistics_included(train: str, still: str, fast: bool) -> None:
    site = place(training=Training(lr=0.1, momentum=0.9, weight_decay=0.1, batch_size=8), fast=fast)
    before = site.model()
    fit(site, site.loss, train=train)
    after = site.model()
    for group in before:
        for name, t in before[group].items():
            unmoved = torch.equal(after[group][name], t)
            assert unmoved == name.startswith(still), name


def test_a_frozen_body_moves_its_statistics_only_when_asked() -> None:
    site = place()
    before = site.buffers()
    fit(site, site.loss, train="head.", move_statistics=True)
    assert not same({"b": site.buffers()}, {"b": before})


def test_frozen_statistics_never_move() -> None:
    site = place(training=Training(batch_size=8, batch_norm="frozen"))
    before = site.buffers()
    fit(site, site.loss)
    assert same({"b": site.buffers()}, {"b": before})
    assert "buffers" not in site.shares()


def test_the_batch_norm_policy_decides_what_is_sent_and_what_stays() -> None:
    groups = {}
    for policy in ("aggregate", "local", "frozen"):
        site = place(training=replace(Training(), batch_norm=policy))
        groups[policy] = (set(site.shares()), set(site.keeps()))
    assert groups == {
        "aggregate": ({"parameters", "buffers"}, set()),
        "local": ({"parameters"}, {"buffers"}),
        "frozen": ({"parameters"}, set()),
    }


def test_personal_parts_are_kept_and_the_rest_is_sent() -> None:
    site = place()
    assert list(site.shares(("head.",))["parameters"]) == [
        "body.0.weight",
        "body.0.bias",
        "body.1.weight",
        "body.1.bias",
    ]
    assert list(site.keeps(("head.",))["parameters"]) == ["head.weight", "head.bias"]


def test_load_overlays_models_in_turn() -> None:
    site = place()
    ones = {"parameters": site.parameters().zeros() | {"head.bias": torch.ones(3)}}
    site.load(ones, {"parameters": site.parameters().like(["body.0.bias"])})
    assert site.parameters()["head.bias"].tolist() == [1, 1, 1]
    assert torch.equal(site.parameters()["body.0.bias"], site.initial["parameters"]["body.0.bias"])
    assert torch.equal(site.buffers()["body.1.running_var"], torch.ones(5))


def test_a_sites_tensors_are_copies() -> None:
    site = place()
    taken = site.model()
    before = {g: {n: t.clone() for n, t in ts.items()} for g, ts in taken.items()}
    fit(site, site.loss)
    assert all(torch.equal(taken[g][n], t) for g in before for n, t in before[g].items())


def test_a_frozen_copy_stays_while_the_net_trains_and_is_used_again_by_the_next_site() -> None:
    site = place()
    teacher = site.frozen(site.model())
    x = site.data.take(torch.arange(5))[0]
    said = teacher(x)
    fit(site, site.loss)
    assert torch.equal(teacher(x), said)
    assert not teacher(x).requires_grad
    second = site.frozen(site.model())
    assert second is not teacher
    assert replace(site, used=0).frozen(site.model()) is teacher


def test_images_are_normalised_by_channel_and_stay_shared() -> None:
    """A pixel of 51 is 0.2; less mean 0.1, over std 0.5: 0.2. Channel two: (0.2 - 0.2) / 1 = 0."""
    pool = torch.full((3, 2, 2, 2), 51, dtype=torch.uint8)
    data = Data(pool, torch.zeros(3, dtype=torch.int64), torch.tensor([2, 0]), (0.1, 0.2), (0.5, 1.0))
    x, _ = data.take(torch.arange(2))
    assert x.shape == (2, 2, 2, 2)
    close(x[:, 0], torch.full((2, 2, 2), 0.2))
    close(x[:, 1], torch.zeros(2, 2, 2), rtol=0, atol=1e-6)
    assert data.part(torch.tensor([1])).x.data_ptr() == pool.data_ptr()


def test_feature_noise_and_rotation_are_a_function_of_client_and_sample() -> None:
    pool = torch.arange(16, dtype=torch.uint8).view(1, 4, 4, 1).repeat(3, 1, 1, 1)
    clean = Data(pool, torch.zeros(3, dtype=torch.int64), torch.arange(3), (0.0,), (1.0,))
    noisy = replace(clean, noise=0.5, seed=7)
    first, again = noisy.take(torch.tensor([0, 1]))[0], noisy.take(torch.tensor([1]))[0]
    assert torch.equal(first[1], again[0])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(replace(noisy, seed=8).take(torch.tensor([1]))[0], again)
    turned = replace(clean, rotation=90.0).take(torch.tensor([0]))[0]
    assert torch.equal(turned, torch.rot90(clean.take(torch.tensor([0]))[0], 1, (2, 3)))
    full = replace(clean, rotation=360.0).take(torch.tensor([0]))[0]
    assert torch.equal(full, clean.take(torch.tensor([0]))[0])


def test_augmentation_changes_training_batches_by_the_sites_generator_only() -> None:
    world = digits(FedAvg(), training=Training(augment="flip", batch_size=16))
    site = world.site(0, 0, "train")
    a = torch.cat([x for x, _ in batches(site, site.training)])
    b = torch.cat([x for x, _ in batches(world.site(0, 0, "train"), site.training)])
    plain = torch.cat([x for x, _ in batches(world.site(0, 0, "train"), replace(site.training, augment=""))])
    assert torch.equal(a, b)
    assert not torch.equal(a, plain)
    assert torch.equal(site.infer(lambda x: x), world.site(0, 0, "train").infer(lambda x: x))


def test_infer_keeps_the_order_and_changes_nothing() -> None:
    site = place(20)
    before = site.model()
    z = site.infer(site.net.body, batch=7)
    close(z, site.infer(site.net.body, batch=20))
    assert z.shape == (20, 5)
    assert same(site.model(), before)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_terms_whose_gradient_is_known_are_what_calling_them_would_be(momentum: float) -> None:
    """Fast, they are where a step's gradient starts from; plain, part of the loss."""
    training = Training(lr=0.1, batch_size=8, epochs=2, momentum=momentum)
    models = []
    for fast in (True, False):
        site = place(training=training, fast=fast)
        anchor, tilt = site.parameters() * 0.5, site.parameters() * 0.1
        fit(site, Corrected(site.loss, tilt=tilt, anchor=anchor, strength=0.3))
        models.append(site.parameters())
    apart = models[0] - models[1]
    assert float(apart.dot(apart)) < 1e-10
    plain = place(training=training)
    fit(plain, plain.loss)
    moved = models[0] - plain.parameters()
    assert float(moved.dot(moved)) > 1e-3


def test_a_frozen_part_is_not_moved_by_such_terms() -> None:
    site = place(training=Training(lr=0.1, batch_size=8))
    before = site.parameters()
    fit(site, Corrected(site.loss, tilt=site.parameters(), anchor=before * 0, strength=1.0), train="head.")
    assert all(torch.equal(t, before[name]) for name, t in site.parameters().items() if name.startswith("body."))


def test_a_head_trained_as_part_of_another_net_still_trains_in_its_own_net() -> None:
    """Fit the whole net, then a net that shares its head, then the whole net: every parameter must move again."""
    site = place(20, net=plain_net())
    fit(site, site.loss)
    shared = replace(site, net=Net(nn.Identity(), site.net.head, 5), data=features_of(site))
    fit(shared, site.loss, train="head.")
    before = site.parameters()
    fit(site, site.loss)
    assert all(not torch.equal(before[name], after) for name, after in site.parameters().items())


def features_of(site: Site) -> Data:
    return Data(site.infer(site.net.body), site.data.labels, torch.arange(len(site.data)))


def test_head_only_trains_a_copy_of_the_head_on_the_bodys_features() -> None:
    site = place(20)
    start = site.model()
    heads = site.head_only()
    assert torch.equal(heads.data.x, site.infer(site.net.body))
    assert torch.equal(heads.data.labels, site.data.labels)
    fit(heads, site.loss, train="head.")
    assert same(site.model(), start)  # the site's own net is untouched
    site.load(start, heads.model())
    moved = {n for n, t in site.parameters().items() if not torch.equal(t, start["parameters"][n])}
    assert moved == {"head.weight", "head.bias"}


def test_head_only_is_the_site_itself_where_features_change_from_pass_to_pass() -> None:
    augmented = place(20, training=Training(augment="flip"))
    assert augmented.head_only() is augmented
    empty = place(0)
    assert empty.head_only() is empty


def test_head_only_takes_features_from_elsewhere() -> None:
    site = place(4, net=plain_net())
    given = Data(torch.ones(2, 5), torch.tensor([0, 1]), torch.arange(2))
    assert site.head_only(given).data is given
