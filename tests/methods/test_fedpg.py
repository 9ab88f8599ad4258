"""FedPG: prototypes, the generator's loss and its training, the virtual set on the wire, the client's terms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn, tensor
from torch.nn.functional import cosine_similarity, cross_entropy
from torch.testing import assert_close

from fedskew.core.losses import alignment, supervised_contrast
from fedskew.core.method import Method, Update, mean_of, model_of
from fedskew.core.net import Net
from fedskew.core.seeding import one_thread, seeded
from fedskew.core.settings import UsageError
from fedskew.core.settings import build as settle
from fedskew.core.site import Site
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Training
from fedskew.federation.loop import run
from fedskew.federation.simulate.simulation import Simulation
from fedskew.federation.wire import digest
from fedskew.federation.world import Ragged, World
from fedskew.methods import vhl
from fedskew.methods._shared.generators import (
    GENERATOR,
    KINDS,
    Generator,
    generator_from,
    nearest_is_own,
    virtual_set,
)
from fedskew.methods._shared.prototypes import GROUP, class_means, some_of_each
from fedskew.methods._shared.virtual import contrast_to_virtual, endless_batches, virtual_labels
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.fedpg import VIRTUAL, FedPG
from fedskew.methods.fedpg.generator_training import GeneratorTraining
from helpers.nets import normed, received, work
from toys import digits, rounds, same

P_V = tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]).double()  # P'
P = tensor([[2.0, 1.0], [0.0, 4.0], [0.0, 0.0]]).double()  # class 2 was not received
KNOWN = tensor([True, True, False])
Z, Y = tensor([[0.5, 0.5]]).double(), tensor([0])
REAL, VIRTUALS, BOTH = (
    tensor([[1.0, 0.0], [0.6, 0.8]]).double(),
    tensor([[0.8, 0.6], [0.0, 1.0]]).double(),
    tensor([0, 1]),
)
PCDD = "pcdd:clients=5,classes=2"  # no class at two clients
FEW = FedPG(source="generator", iterations=2, generate_every=1, n_v=3, virtual_batch=8, generator_batch=16)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Parts of a round are called here outside the loop, which sees to it."""
    with one_thread():
        yield


def small(method: Method, **options: Any) -> World:
    return digits(method, hidden="12", **options)


def few(**changes: Any) -> FedPG:
    return replace(FEW, **changes)


# Eq. 4 and 5


def test_a_client_takes_m_samples_of_each_class_once_or_all_it_has() -> None:
    labels = tensor([1, 1, 1, 1, 1, 3, 3, 0])
    for seed in range(5):
        chosen = some_of_each(labels, 2, seeded(seed))
        assert labels[chosen].tolist() == [0, 1, 1, 3, 3]
        assert len(set(chosen.tolist())) == 5
    picks = {tuple(some_of_each(labels, 2, seeded(seed)).sort().values.tolist()) for seed in range(40)}
    assert len(picks) == math.comb(5, 2)  # every pair of class 1 in some draw
    assert some_of_each(labels, 9, seeded(0)).sort().values.tolist() == list(range(8))


def test_own_prototypes_are_means_under_the_trained_model_in_evaluation_mode() -> None:
    """m as large as the data: every sample counts. With batch norm the statistics are the trained model's."""
    world = normed(few(m=1000))
    update = work(world, 1, 0, received(world), {}).update
    site = world.site(1, 0, "train")
    z = site.infer(site.frozen(model_of(update.payload)).body)
    wanted = class_means(z, site.data.labels, 10)
    assert_close(update.payload[GROUP]["mean"], wanted["mean"])
    assert torch.equal(update.payload[GROUP]["count"], (wanted["count"] > 0).float())
    assert (wanted["count"] > 1).any()  # the number of samples is not sent


def test_a_prototype_is_the_mean_of_m_samples() -> None:
    """m = 1: each prototype is the feature of one sample of its class."""
    world = normed(few(m=1))
    update = work(world, 1, 0, received(world), {}).update
    site = world.site(1, 0, "train")
    z, y = site.infer(site.frozen(model_of(update.payload)).body), site.data.labels
    for c in y.unique():
        assert (z[y == c] - update.payload[GROUP]["mean"][c]).abs().sum(1).min() < 1e-5


def plane(seed: int) -> Net:
    """8x8 digits to two features; three classes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net(nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), nn.Linear(2, 3), 2)


def test_global_prototypes_are_the_plain_mean_of_those_received() -> None:
    """Class 0 from (1, 0) and (3, 2): (2, 1), whatever the clients' sizes; class 1 from (0, 4); class 2 from none."""
    world = replace(digits(FEW), make_net=partial(plane, 0), classes=3)
    site = world.server_site(0, "train")
    server = world.method.init_server(site)
    own = [
        (tensor([[1.0, 0], [0, 4], [0, 0]]), [1.0, 1, 0], 30.0),
        (tensor([[3.0, 2], [0, 0], [0, 0]]), [1.0, 0, 0], 10.0),
    ]
    updates = [Update(server | {GROUP: Tensors(mean=m, count=tensor(c))}, n) for m, c, n in own]
    found = world.method.aggregate(site, server, iter(updates))[GROUP]
    assert found["mean"].tolist() == [[2.0, 1.0], [0.0, 4.0], [0.0, 0.0]]
    assert found["count"].tolist() == [2.0, 1.0, 0.0]


# Eq. 6 to 10


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (FedPG(), 0.766227),
        (FedPG(anchor=False), 0.702263 + 0.0005),
        (FedPG(lambda_s=0), 0.702263 + 0.063464),
        (FedPG(lambda_s=2), 0.702263 + 1 + 0.063464),
        (FedPG(distance="norm"), 0.973034 + 0.0005 + 0.865466 / 2),
    ],
    ids=["whole", "GT-d", "GT-p", "lambda_s=2", "norm"],
)
def test_the_generator_s_loss_on_numbers(method: FedPG, expected: float) -> None:
    """l_dce .702263, l_p = |(.5, .5) - (1, 0)|^2 = .5, d .063464: .702263 + .001 * .5 + .063464 = .766227."""
    assert method.generator_training().loss(Z, Y, P_V, P, KNOWN).item() == pytest.approx(expected, abs=1e-6)


def test_the_prototype_loss_is_a_mean_over_samples_of_sums_over_features() -> None:
    z, y = torch.cat([Z, Z + 1]), tensor([0, 1])
    with_it, without = (
        FedPG(lambda_s=lambda_s, anchor=False).generator_training().loss(z, y, P_V, P, KNOWN) for lambda_s in (1, 0)
    )
    l_p = with_it - without
    assert l_p.item() == pytest.approx((0.5 + 1.5**2 + 0.5**2) / 2)


def test_the_prototype_loss_pulls_the_virtual_prototype_to_the_features_too() -> None:
    """Of |(.5, .5) - P'_0|^2 at P'_0 = (1, 0): 2 (P'_0 - z) = (1, -1); the prototypes of other classes stay."""

    def gradient(lambda_s: float) -> Tensor:
        virtual = P_V.clone().requires_grad_()
        loss = FedPG(lambda_s=lambda_s, anchor=False).generator_training().loss(Z, Y, virtual, P, KNOWN)
        return torch.autograd.grad(loss, virtual)[0]

    assert_close(gradient(1.0) - gradient(0.0), tensor([[1.0, -1.0], [0.0, 0.0], [0.0, 0.0]]).double())


def test_the_extractor_sees_generated_images_as_clients_do_with_pixels() -> None:
    """A generator that always makes -1: with `pixels` a black image, (0 - mean) / std; without, -1 itself."""
    for pixels in (True, False):
        method = few(pixels=pixels, iterations=1)
        site = small(method).server_site(0, "train")
        black = nn.Linear(12, 64)
        nn.init.zeros_(black.weight)
        nn.init.constant_(black.bias, -1.0)
        seen: list[Tensor] = []

        def extractor(images: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(images.detach())
            return images.flatten(1)[:, :12]

        real = Tensors(mean=torch.zeros(10, 12), count=torch.ones(10))
        virtual = torch.zeros(10, 12, requires_grad=True)
        method.train_generator(site, extractor, Generator(black, 2, 10, (1, 8, 8)), virtual, real)
        wanted = -site.data.mean[0] / site.data.std[0] if pixels else -1.0
        assert_close(seen[0], torch.full((16, 1, 8, 8), wanted))


def steady(self: GeneratorTraining, z: Tensor, y: Tensor, virtual: Tensor, P: Tensor, known: Tensor) -> Tensor:
    """A loss whose gradient is 1 in every coordinate of P' and 0 in G: Adam then steps by its lr."""
    return virtual.sum() + 0 * z.sum()


def travelled(method: FedPG) -> Tensor:
    """How far P' goes in the first round."""
    world = small(method)
    site, server = world.server_site(0, "train"), world.method.init_server(world.server_site(0, "init"))
    real = Tensors(mean=torch.zeros(10, 12), count=torch.zeros(10))
    made = method.generated(site, server, real)
    start = replace(method, iterations=0).generated(world.server_site(0, "train"), server, real)
    return start[GROUP]["virtual"] - made[GROUP]["virtual"]


@pytest.mark.parametrize(("preset", "lr"), [("paper", 2e-5), ("robust", 1e-3)])
def test_virtual_prototypes_travel_by_the_preset_s_rate_which_falls_every_20_steps(
    preset: Literal["paper", "robust"], lr: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """25 steps: 20 at lr, 5 at .95 lr."""
    monkeypatch.setattr(GeneratorTraining, "loss", steady)
    moved = travelled(FedPG(preset=preset, source="generator", iterations=25, generator_batch=2))
    assert_close(moved, torch.full((10, 12), lr * (20 + 0.95 * 5)), rtol=2e-3, atol=0)


def test_virtual_images_stay_until_the_generator_is_due_again_and_the_model_goes_on() -> None:
    """Trained after rounds 0, 3 and 6; a run that is resumed in between goes on alike (the law of resuming)."""
    records, _ = rounds(small(few(generate_every=3)), 7)
    servers = [record.server for record in records]
    kept = [same({VIRTUAL: a[VIRTUAL]}, {VIRTUAL: b[VIRTUAL]}) for a, b in pairwise(servers)]
    assert kept == [True, True, False, True, True, False]
    assert [same({GENERATOR: a[GENERATOR]}, {GENERATOR: b[GENERATOR]}) for a, b in pairwise(servers)] == kept
    assert not any(same({"parameters": a["parameters"]}, {"parameters": b["parameters"]}) for a, b in pairwise(servers))


def test_our_generator_takes_a_tenth_of_the_published_steps() -> None:
    ours, paper = FedPG(source="generator"), FedPG(preset="paper")
    per_round = [
        m.chosen("iterations") * m.chosen("generator_batch") / m.chosen("generate_every") for m in (ours, paper)
    ]
    assert per_round[0] * 10 == per_round[1]


def test_adam_forgets_half_of_its_direction_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients 1, -1 and beta 1/2: m = 1/2, then -1/4; over 1 - beta^t steps of 1 and -1/3. At beta .9: 1, -.053."""
    signs = iter([1.0, -1.0])

    def turning(self: GeneratorTraining, z: Tensor, y: Tensor, virtual: Tensor, P: Tensor, known: Tensor) -> Tensor:
        return next(signs) * virtual.sum() + 0 * z.sum()

    monkeypatch.setattr(GeneratorTraining, "loss", turning)
    moved = travelled(FedPG(lr=0.3, iterations=2, generator_batch=2))
    assert_close(moved, torch.full((10, 12), 0.2), rtol=1e-3, atol=0)


def test_a_given_learning_rate_overrides_the_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GeneratorTraining, "loss", steady)
    moved = travelled(FedPG(lr=0.5, iterations=1, generator_batch=2))
    assert_close(moved, torch.full((10, 12), 0.5))


def test_robust_starts_at_the_real_ones_and_elsewhere_at_the_last() -> None:
    real = Tensors(mean=P.float(), count=KNOWN.float())
    last = tensor([[7.0, 7.0]] * 3)
    for method in (FedPG(), FedPG(preset="paper", start="real")):
        started = method.generator_training().started(real, last, seeded(0))
        assert started.tolist() == [[2.0, 1.0], [0.0, 4.0], [7.0, 7.0]]


def test_before_there_is_a_last_one_a_missing_class_starts_about_the_mean() -> None:
    """Mean of (2, 1) and (0, 4): (1, 2.5). Spread of the numbers 2, 1, 0, 4: sqrt(35 / 16)."""
    real = Tensors(mean=P.float(), count=KNOWN.float())
    drawn = torch.stack([FedPG().generator_training().started(real, None, seeded(seed)) for seed in range(2000)])
    assert torch.equal(drawn[:, :2], real["mean"][:2].expand(2000, 2, 2))
    assert_close(drawn[:, 2].mean(0), tensor([1.0, 2.5]), atol=0.12, rtol=0)
    assert_close(drawn[:, 2].std(0), torch.full((2,), math.sqrt(35) / 4), atol=0.08, rtol=0)


def test_paper_starts_at_random_and_so_does_robust_without_prototypes() -> None:
    real, nothing = (Tensors(mean=P.float(), count=count) for count in (KNOWN.float(), torch.zeros(3)))
    for method, given in ((FedPG(preset="paper"), real), (FedPG(start="random"), real), (FedPG(), nothing)):
        drawn = torch.stack([method.generator_training().started(given, None, seeded(seed)) for seed in range(1000)])
        assert_close(drawn.mean(0), torch.zeros(3, 2), atol=0.12, rtol=0)
        assert_close(drawn.std(0), torch.ones(3, 2), atol=0.1, rtol=0)


@pytest.mark.parametrize("count", [1, 0])
def test_one_class_or_none_received_is_enough(count: int) -> None:
    real = Tensors(mean=P.float(), count=tensor([float(count), 0.0, 0.0]))
    assert FedPG().generator_training().started(real, None, seeded(0)).isfinite().all()
    assert FedPG().generator_training().loss(Z, Y, P_V, P, real["count"] > 0).isfinite()


def aggregated(world: World) -> tuple[Payload, list[Update]]:
    """The server after one round, and what it was sent."""
    start = received(world)
    updates = [work(world, c, 0, start, {}).update for c in range(world.population)]
    server = world.method.init_server(world.server_site(0, "init"))
    return world.method.aggregate(world.server_site(0, "train"), server, iter(updates)), updates


@pytest.mark.parametrize("gen", KINDS)
def test_training_the_generator_leaves_the_global_model_as_it_was_averaged(gen: str) -> None:
    """Bit for bit, batch-norm statistics too. G and P' move."""
    world = normed(few(gen=gen, iterations=5))
    server, updates = aggregated(world)
    assert same(model_of(server), mean_of(updates))
    assert server["buffers"]
    still = small(few(gen=gen, iterations=0))
    untrained, _ = aggregated(replace(still, make_net=world.make_net))
    assert not torch.equal(server[GENERATOR]["layers.0.weight"], untrained[GENERATOR]["layers.0.weight"])
    assert not torch.equal(server[GROUP]["virtual"], untrained[GROUP]["virtual"])
    assert torch.equal(untrained[GROUP]["virtual"], server[GROUP]["mean"])  # every class was received


def test_the_generator_is_trained_against_the_new_global_extractor_which_is_frozen() -> None:
    bodies = []

    class Looking(FedPG):
        def train_generator(self, site: Site, f: Any, G: Generator, virtual: Tensor, P: Tensors) -> None:
            bodies.append({f"body.{name}": t.clone() for name, t in f.state_dict().items()})
            assert not f.training
            assert not any(p.requires_grad for p in f.parameters())

    server, _ = aggregated(normed(Looking(source="generator", n_v=1)))
    model = server["parameters"] | server["buffers"]
    assert bodies[0].keys() == {name for name in model if name.startswith("body.")}
    assert all(torch.equal(t, model[name]) for name, t in bodies[0].items())


@pytest.mark.parametrize("gen", KINDS)
def test_the_virtual_set_is_balanced_within_one_and_made_by_the_generator_it_keeps(gen: str) -> None:
    server = rounds(small(few(gen=gen)), 1)[0][0].server
    images = server[VIRTUAL]["images"]
    assert images.shape == (30, 1, 8, 8)
    assert images.abs().max() <= 1
    values = Tensors(server[GENERATOR])
    seed = int(values.pop("seed"))
    made = virtual_set(generator_from(partial(KINDS[gen], (1, 8, 8), 10), values), 3, seed)
    assert torch.equal(images, made)


def near(server: Payload, world: World, method: FedPG) -> float:
    site = world.server_site(1, "train")
    z = site.frozen(server).body(method.seen(server[VIRTUAL]["images"], site.data))
    return nearest_is_own(z, virtual_labels(10, method.n_v), server[GROUP])


@pytest.mark.slow  # trains for seconds
def test_robust_makes_images_of_the_prototypes_and_paper_does_not() -> None:
    """The share of virtual images whose feature is nearest to their own class's real prototype; chance is .1."""
    found = {}
    for preset in ("robust", "paper"):
        method = FedPG(preset=preset, source="generator", iterations=120, n_v=8, generator_batch=64)  # type: ignore[arg-type]
        world = digits(method, hidden="32")
        found[preset] = near(rounds(world, 1)[0][0].server, world, method)
    assert found["robust"] > 0.9
    assert found["paper"] < 0.4


def test_the_generator_is_kept_between_rounds_and_its_noise_is_new() -> None:
    """Without training steps its values stay those drawn first; images differ by the noise alone."""
    a, b = (r.server for r in rounds(small(few(iterations=0)), 2)[0])
    assert all(torch.equal(a[GENERATOR][n], b[GENERATOR][n]) for n in a[GENERATOR] if n != "seed")
    assert a[GENERATOR]["seed"] != b[GENERATOR]["seed"]
    assert not torch.equal(a[VIRTUAL]["images"], b[VIRTUAL]["images"])


# Eq. 11 to 13


def contrast_by_hand(z: Tensor, y: Tensor, tau: float) -> list[float]:
    values = []
    for i in range(len(y)):
        s = (cosine_similarity(z[i : i + 1], z) / tau).tolist()
        rest = math.log(sum(math.exp(s[a]) for a in range(len(y)) if a != i))
        own = [rest - s[p] for p in range(len(y)) if p != i and y[p] == y[i]]
        values.append(sum(own) / max(len(own), 1))
    return values


@pytest.mark.parametrize(("tau", "expected"), [(0.07, 1.221856), (0.5, 0.870714)])
def test_the_contrast_on_numbers(tau: float, expected: float) -> None:
    """Real (1, 0) of class 0, (.6, .8) of 1; virtual (.8, .6) of 0, (0, 1) of 1."""
    z, y = torch.cat([REAL, VIRTUALS]), BOTH.repeat(2)
    assert supervised_contrast(z, y, tau).item() == pytest.approx(expected, abs=1e-6)
    by_hand = contrast_by_hand(z, y, tau)
    assert sum(by_hand) / 4 == pytest.approx(expected, abs=1e-6)
    if tau == 0.07:
        assert by_hand == pytest.approx([0.055854, 2.387858, 2.387858, 0.055854], abs=1e-6)
    assert supervised_contrast(3 * z, y, tau).item() == pytest.approx(expected, abs=1e-6)


def test_samples_without_another_of_their_class_add_nothing() -> None:
    assert supervised_contrast(VIRTUALS, BOTH, 0.07).item() == 0
    z, y = torch.cat([REAL, VIRTUALS]).requires_grad_(), tensor([0, 1, 0, 2])
    value = supervised_contrast(z, y, 0.5)
    assert value.item() == pytest.approx(sum(contrast_by_hand(z.detach(), y, 0.5)) / 4)
    (grad,) = torch.autograd.grad(value, z)
    assert grad.isfinite().all()
    (alone,) = torch.autograd.grad(supervised_contrast(z[:1], y[:1], 0.5), z)
    assert not alone.any()


def test_virtual_features_are_moved_by_their_own_contrast_alone() -> None:
    """The joint contrast moves the real ones only; 0.1 of the virtual one moves the virtual ones."""
    virtual, y_v = torch.cat([VIRTUALS, REAL.flip(0)]), tensor([0, 1, 0, 1])
    z, z_v = REAL.clone().requires_grad_(), virtual.clone().requires_grad_()
    value = alignment(z, BOTH, z_v, y_v, 0.5)
    joint = supervised_contrast(torch.cat([REAL, virtual]), torch.cat([BOTH, y_v]), 0.5).item()
    alone = sum(contrast_by_hand(virtual, y_v, 0.5)) / 4
    assert alone > 0.5
    assert value.item() == pytest.approx(joint + 0.1 * alone)
    grad, grad_v = torch.autograd.grad(value, (z, z_v))
    (own,) = torch.autograd.grad(0.1 * supervised_contrast(z_v, y_v, 0.5), z_v)
    assert own.any()
    assert_close(grad_v, own)
    assert grad.any()


def test_equation_11_on_numbers() -> None:
    """tau 2: log(1 + e^-.4) = .513015, log(1 + e^.08) = .733947; positives left out as printed: -.4 and .08."""
    for row, expected in ((0, 0.513015), (1, 0.733947)):
        value = contrast_to_virtual(REAL[row : row + 1], BOTH[row : row + 1], VIRTUALS, BOTH, 2.0)
        assert value.item() == pytest.approx(expected, abs=1e-6)
    both = contrast_to_virtual(5 * REAL, BOTH, VIRTUALS, BOTH, 2.0)
    assert both.item() == pytest.approx((0.513015 + 0.733947) / 2, abs=1e-6)


def test_in_equation_11_a_sample_without_positives_adds_nothing() -> None:
    z = REAL.clone().requires_grad_()
    value = contrast_to_virtual(z, tensor([0, 2]), VIRTUALS, BOTH, 2.0)
    (grad,) = torch.autograd.grad(value, z)
    assert value.item() == pytest.approx(0.513015 / 2, abs=1e-6)
    assert grad[0].any()
    assert not grad[1].any()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lambda_c": 3.0},
        {"lambda_v": 0.5},
        {"lambda_c": 0.0},
        {"lambda_v": 0.0},
        {"fa": "eq11"},
        {"pixels": True},
        {"source": "noise"},
    ],
    ids=lambda changes: str(changes),
)
def test_the_client_s_loss_is_equation_13(changes: dict[str, Any]) -> None:
    method = few(**changes)
    world = small(method)
    broadcast = method.broadcast(rounds(world, 1)[0][0].server)
    site = world.site(1, 1, "train")
    site.load(broadcast)
    x, y = site.data.take(torch.arange(16))
    loss = method.objective(site, broadcast, {})(site.net, x, y)
    images = method.virtual(site, broadcast) if method.source == "noise" else broadcast[VIRTUAL]["images"]
    if method.pixels:
        images = ((images + 1) / 2 - world.mean[0]) / world.std[0]
    x_v, y_v = next(endless_batches(images, virtual_labels(10, 3), 8, world.site(1, 1, "train").rng))
    z, z_v, head = site.net.body(x), site.net.body(x_v), site.net.head
    align = alignment if method.fa == "supcon" else contrast_to_virtual
    wanted = cross_entropy(head(z), y) + method.lambda_v * cross_entropy(head(z_v), y_v)
    assert_close(loss, wanted + method.lambda_c * align(z, y, z_v, y_v, 0.07))


def test_without_alignment_virtual_images_still_move_the_body() -> None:
    """Through their cross entropy; with alignment alone through the tenth."""
    for changes in ({"lambda_c": 0.0}, {"lambda_v": 0.0}):
        method = few(**changes)
        world = small(method)
        broadcast = method.broadcast(rounds(world, 1)[0][0].server)
        site = world.site(1, 1, "train")
        site.load(broadcast)
        empty = replace(site, loss=lambda net, x, y: net(x).sum() * 0 if len(y) == 1 else cross_entropy(net(x), y))
        x, y = site.data.take(torch.arange(1))
        loss = method.objective(empty, broadcast, {})(site.net, x, y)
        grads = torch.autograd.grad(loss, list(site.net.body.parameters()))
        assert any(g.any() for g in grads)


# source=noise, the control without a generator

NOISE = FedPG(source="noise", n_v=3, virtual_batch=8)


def test_the_noise_is_vhl_s_set_with_the_seed_that_the_server_sends() -> None:
    world = small(NOISE)
    broadcast, site = received(world), world.site(1, 0, "train")
    seed = int(broadcast[VIRTUAL]["seed"])
    assert broadcast[VIRTUAL].keys() == {"seed"}
    assert torch.equal(NOISE.virtual(site, broadcast), vhl.noise_set(site.data, 10, 3, seed))
    again = world.site(3, 2, "train")
    assert torch.equal(NOISE.virtual(again, broadcast), NOISE.virtual(site, broadcast))  # at every client and round


def test_noise_needs_no_generator_and_no_prototypes() -> None:
    """The only extra payload is a seed of 8 bytes to each client; the server does nothing but average."""

    class Idle(FedPG):
        def generated(self, site: Site, server: Payload, P: Tensors) -> Payload:
            raise AssertionError("the server must not train a generator")

    ours, _ = rounds(small(Idle(source="noise", n_v=3, virtual_batch=8)), 2, cohorts=[[0, 1]] * 2)
    plain, _ = rounds(small(FedAvg()), 2, cohorts=[[0, 1]] * 2)
    for a, b in zip(ours, plain, strict=True):
        assert a.bytes_down == b.bytes_down | {VIRTUAL: 2 * 8}
        assert a.bytes_up == b.bytes_up
    assert ours[-1].server.keys() == {"parameters", "buffers", VIRTUAL}
    assert torch.equal(ours[0].server[VIRTUAL]["seed"], ours[1].server[VIRTUAL]["seed"])


def test_the_noise_is_used_from_the_first_round_until_the_last() -> None:
    plain, _ = rounds(small(FedAvg()), 3)
    ours, _ = rounds(small(NOISE), 1)
    assert not same(model_of(ours[0].server), model_of(plain[0].server))
    ended, _ = rounds(small(replace(NOISE, until=2)), 3)
    assert [VIRTUAL in r.bytes_down for r in ended] == [True, True, False]
    never, _ = rounds(small(replace(NOISE, until=0)), 3)
    assert same(never[-1].server, plain[-1].server)


def test_the_default_is_noise_and_the_paper_s_preset_has_the_generator_as_published() -> None:
    assert FedPG().chosen("source") == "noise"
    paper = FedPG(preset="paper")
    published = {"source": "generator", "start": "random", "lr": 2e-5, "iterations": 300, "generator_batch": 128}
    assert {name: paper.chosen(name) for name in published} == published
    assert paper.chosen("generate_every") == 1
    assert FedPG(preset="paper", source="noise").chosen("source") == "noise"


# batch norm


@pytest.mark.parametrize("method", [FEW, NOISE], ids=["generator", "noise"])
def test_running_statistics_are_of_real_batches_only(method: FedPG) -> None:
    """One step moves them as a pass over the real batch alone does; virtual images are far from real ones."""
    world = normed(method)
    broadcast = method.broadcast(rounds(world, 1)[0][0].server)
    site = world.site(1, 1, "train")
    x, y = site.data.take(torch.arange(16))
    site.load(broadcast)
    site.net.train()
    before = site.buffers()
    site.net(x)
    wanted = site.buffers()
    site.load(broadcast)
    site.net.train()
    method.objective(site, broadcast, {})(site.net, x, y)
    found = site.buffers()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not torch.equal(found["body.2.running_mean"], before["body.2.running_mean"])
    assert found["body.2.num_batches_tracked"] == before["body.2.num_batches_tracked"] + 1


# the way through a run


def test_the_first_round_is_fedavg_s_bit_for_bit_and_the_second_is_not() -> None:
    ours, _ = rounds(small(FEW), 2)
    plain, _ = rounds(small(FedAvg()), 2)
    assert same(model_of(ours[0].server), model_of(plain[0].server))
    assert ours[0].bytes_down == plain[0].bytes_down
    assert not same(model_of(ours[1].server), model_of(plain[1].server))


def test_shipping_the_generator_gives_the_same_bits_and_both_are_in_the_ledger() -> None:
    """30 images of 64 numbers; of G five linear layers with a bias and four batch norms."""
    shipped = {
        ship: rounds(small(few(ship=ship)), 3, cohorts=[[0, 1], [1, 2, 3], [4]])[0] for ship in ("images", "generator")
    }
    for a, b in zip(*shipped.values(), strict=True):
        assert same(model_of(a.server), model_of(b.server))
        assert a.bytes_up == b.bytes_up
    images, generator = (records[1].bytes_down for records in shipped.values())
    linear = [(522, 128), (128, 256), (256, 512), (512, 1024), (1024, 64)]
    numbers = sum(i * o + o for i, o in linear) + 4 * (128 + 256 + 512 + 1024)
    assert images[VIRTUAL] == 3 * 4 * 30 * 64
    assert generator[GENERATOR] == 3 * (4 * numbers + 8 * 4 + 8)  # four counters of batches and the seed
    assert GENERATOR not in images
    assert VIRTUAL not in generator
    assert VIRTUAL not in shipped["generator"][1].server
    assert shipped["images"][0].bytes_down.keys() == {"parameters", "buffers"}


def test_prototypes_cost_d_numbers_a_class_and_its_mark_up_and_nothing_down() -> None:
    records, _ = rounds(small(FEW), 2, cohorts=[[0], [1, 2]])
    assert records[1].bytes_up[GROUP] == 2 * 4 * 10 * (12 + 1)
    assert GROUP not in records[1].bytes_down


def test_classes_that_a_round_lacks_start_from_the_last_virtual_prototypes() -> None:
    """Clients of disjoint classes take turns; the second round's missing classes keep the first's P'."""
    method = few(iterations=0)
    records, simulation = rounds(small(method, split=PCDD), 2, cohorts=[[0], [1]])
    first, second = (r.server[GROUP] for r in records)
    held = [torch.bincount(simulation.world.site(c, 0, "train").data.labels, minlength=10) > 0 for c in (0, 1)]
    assert torch.equal(first["count"] > 0, held[0])
    assert torch.equal(second["count"] > 0, held[1])  # the first round's are not counted again
    assert torch.equal(second["virtual"][~held[1]], first["virtual"][~held[1]])
    assert torch.equal(second["virtual"][held[1]], second["mean"][held[1]])


@pytest.mark.parametrize("preset", ["robust", "paper"])
def test_virtual_images_include_classes_that_no_client_has(preset: str) -> None:
    world = small(few(preset=preset, iterations=3))
    kept = [world.train[c][world.y[world.train[c]] < 6].numpy() for c in range(5)]
    records, _ = rounds(replace(world, train=Ragged.of(kept)), 3)
    server = records[-1].server
    assert not server[GROUP]["count"][6:].any()
    assert server[VIRTUAL]["images"].shape[0] == 30
    assert all(t.isfinite().all() for ts in server.values() for t in ts.values())


def test_after_the_last_round_with_virtual_data_it_is_fedavg() -> None:
    """until=2: rounds 0 and 1; D' is not sent in round 2, and nothing of it is kept."""
    records, _ = rounds(small(few(until=2)), 3)
    assert [VIRTUAL in r.bytes_down for r in records] == [False, True, False]
    assert records[1].server.keys() == {"parameters", "buffers"}
    never, _ = rounds(small(few(until=0)), 2)
    plain, _ = rounds(small(FedAvg()), 2)
    assert same(never[-1].server, plain[-1].server)


def test_switched_off_it_sends_and_keeps_nothing_of_its_own() -> None:
    records, _ = rounds(small(few(lambda_c=0.0, lambda_v=0.0)), 2)
    plain, _ = rounds(small(FedAvg()), 2)
    assert same(records[-1].server, plain[-1].server)
    assert records[-1].bytes_up == plain[-1].bytes_up
    assert records[-1].bytes_down == plain[-1].bytes_down


@pytest.mark.parametrize("gen", KINDS)
def test_both_generators_work_with_a_convolutional_net_and_batch_norm(gen: str) -> None:
    method = few(gen=gen, iterations=1)
    training = Training(lr=0.05, batch_size=16)
    records, _ = rounds(
        digits(method, training=training, model="resnet8", split="iid:clients=3"), 2, cohorts=[[0], [1]]
    )
    assert all(t.isfinite().all() for ts in records[-1].server.values() for t in ts.values())


@pytest.mark.slow  # starts processes
@pytest.mark.usefixtures("quick_workers")
def test_the_generator_gives_the_same_bits_for_one_and_two_workers() -> None:
    """The laws test the default, which has no generator."""
    digests = set()
    for workers in (1, 2):
        world = small(FEW)
        with Simulation(world, workers=workers) as simulation:
            *_, record = run(world.method, simulation, simulation.world.server_site, 2, lambda round: [0, 1, 2])
            digests.add(digest(record.server))
    assert len(digests) == 1


def test_invalid_settings_are_rejected() -> None:
    with pytest.raises(UsageError, match="generator_batch"):
        settle(FedPG, {"generator_batch": 1}, "fedpg")
    with pytest.raises(UsageError, match="expected one of robust, paper"):
        settle(FedPG, {"preset": "papper"}, "fedpg")
