"""FedCD: Eqs. 1 to 15, who trains what, the fine classifier and its plain head, k-means."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from torch import Tensor, nn, tensor
from torch.nn.functional import cosine_similarity, cross_entropy, linear
from torch.testing import assert_close

from fedskew.core.losses import decoupled
from fedskew.core.method import Method, Update, model_of
from fedskew.core.samples import Data
from fedskew.core.seeding import one_thread, seeded
from fedskew.core.settings import UsageError
from fedskew.core.settings import build as settle
from fedskew.core.site import Site
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Training
from fedskew.experiment.assemble import assemble
from fedskew.experiment.config import Experiment
from fedskew.federation.make_world import world_from_tensors
from fedskew.federation.wire import size_of
from fedskew.federation.world import World
from fedskew.methods import fedcd
from fedskew.methods._shared.prototypes import GROUP, class_means
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.fedcd import FedCD
from fedskew.methods.fedcd.subclasses import (
    FineHead,
    GuidedHead,
    assign_fine_classes,
    client_weights,
    combine_classifiers,
    drawn_prototypes,
    hierarchical_contrast,
    hierarchy,
    k_means,
    lloyd,
    log_quality,
    most_similar,
    of_class_means,
    split_head,
)
from fedskew.models import Net, build
from toys import digits, rounds, same

P4 = tensor([[1.0, 0.0], [0.6, 0.8], [-1.0, 0.0], [0.0, -1.0]])  # two classes of two
Z, FIRST, SECOND = tensor([[0.8, 0.6]]), tensor([0]), tensor([1])
ALL = torch.ones(4, dtype=torch.bool)
OFF = FedCD(M=1, gamma=0, lam=0, rho=0, mu=1.0, classifier="mean", clip="off", bias=True)
PCDD = "pcdd:clients=5,classes=2"  # no class at two clients
seeds = st.integers(0, 2**31)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Parts of a round are called here outside the loop, which sees to it."""
    with one_thread():
        yield


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def some(seed: int, n: int, below: int) -> Tensor:
    return torch.randint(below, (n,), generator=torch.Generator().manual_seed(seed))


def small(method: Method, **options: Any) -> World:
    return digits(method, hidden="12", **options)


@cache
def server() -> Payload:
    """After one round of the defaults."""
    return rounds(small(FedCD()), 1)[0][0].server


# Eqs. 2 to 5: fine classes and the hierarchical contrast


@pytest.mark.parametrize(
    ("alpha", "tau", "expected"), [(0.1, 1.0, 0.357099), (0.5, 1.0, 0.480673), (0.1, 0.5, 0.130147)]
)
def test_the_contrast_weighs_own_class_by_alpha_and_others_by_the_rest(
    alpha: float, tau: float, expected: float
) -> None:
    """cos = (.8, .96 | -.8, -.6), t = 1: e^.96 / (e^.96 + .1 e^.8 + .9 (e^-.8 + e^-.6)) = .699703, -log .357099."""
    loss = hierarchical_contrast(Z, SECOND, P4, hierarchy(ALL, 2, alpha), tau)
    assert loss.tolist() == pytest.approx([expected], abs=1e-6)


@pytest.mark.parametrize(("alpha", "expected"), [(0.5, 0.096172), (0.1, 0.166960), (0.0, 0.183901)])
def test_with_one_prototype_a_class_alpha_scales_the_negatives_and_0_is_infonce(alpha: float, expected: float) -> None:
    """cos = (.8 | -.8): log(1 + (1 - alpha) e^-1.6)."""
    loss = hierarchical_contrast(Z, FIRST, P4[::2], hierarchy(ALL[:2], 1, alpha), 1.0)
    assert loss.tolist() == pytest.approx([expected], abs=1e-6)
    assert expected == pytest.approx(math.log(1 + (1 - alpha) * math.exp(-1.6)), abs=1e-6)


@settings(max_examples=10, deadline=None)
@given(seeds, st.sampled_from([1, 2, 3]), st.sampled_from([0.0, 0.1, 0.4]))
def test_the_contrast_at_once_equals_sample_by_sample(seed: int, M: int, alpha: float) -> None:
    z, P, fine = normal(seed, 9, 5), normal(seed + 1, 4 * M, 5), some(seed, 9, 4 * M)
    known = (some(seed + 2, 4 * M, 3) > 0).index_fill(0, fine, True)
    found = hierarchical_contrast(z, fine, P, hierarchy(known, M, alpha), 0.7)
    for i, own in enumerate(fine.tolist()):
        s = (cosine_similarity(z[i : i + 1], P) / 0.7).exp()
        rest = [
            (alpha if j // M == own // M else 1 - alpha) * float(s[j]) for j in range(4 * M) if known[j] and j != own
        ]
        assert float(found[i]) == pytest.approx(-math.log(float(s[own]) / (float(s[own]) + sum(rest))), abs=1e-5)


def test_an_unknown_prototype_takes_no_part_and_gets_no_gradient() -> None:
    known = tensor([True, True, False, True])
    P = P4.clone().requires_grad_()
    loss = hierarchical_contrast(Z, SECOND, P, hierarchy(known, 2, 0.1), 1.0)
    loss.sum().backward()
    assert P.grad is not None
    assert not P.grad[2].any()
    assert P.grad[3].any()
    elsewhere = P4.index_fill(0, tensor([2]), 7.0)
    assert torch.equal(hierarchical_contrast(Z, SECOND, elsewhere, hierarchy(known, 2, 0.1), 1.0), loss)


@settings(max_examples=10, deadline=None)
@given(seeds)
def test_the_contrast_turns_prototypes_and_never_stretches_them(seed: int) -> None:
    """The cosine is free of scale: P . dL/dP = 0 for each prototype."""
    z, P, fine = normal(seed, 8, 5), normal(seed + 1, 6, 5).requires_grad_(), some(seed, 8, 6)
    hierarchical_contrast(z, fine, P, hierarchy(torch.ones(6, dtype=torch.bool), 2, 0.1), 1.0).sum().backward()
    assert P.grad is not None
    assert_close((P * P.grad).sum(1), torch.zeros(6), atol=1e-5, rtol=0)


def test_features_and_prototypes_of_zero_length_give_finite_gradients() -> None:
    z, P = torch.zeros(2, 3, requires_grad=True), torch.zeros(4, 3, requires_grad=True)
    hierarchical_contrast(z, tensor([0, 3]), P, hierarchy(ALL, 2, 0.1), 1.0).sum().backward()
    assert z.grad is not None
    assert P.grad is not None
    assert z.grad.isfinite().all()
    assert P.grad.isfinite().all()


def test_a_sample_is_of_the_most_similar_known_prototype_of_its_class() -> None:
    """cos = (.8, .96 | -.8, -.6); length does not count, unknown ones and other classes neither."""
    z, y = Z.repeat(2, 1), tensor([0, 1])
    longer = P4 * tensor([[50.0], [1], [50], [1]])
    assert most_similar(z, y, longer, ALL, 2).tolist() == [1, 3]
    assert most_similar(z, y, longer, tensor([True, False, True, False]), 2).tolist() == [0, 2]


# Eqs. 6, 7


def test_batch_prototypes_are_the_means_of_the_classes_in_the_batch() -> None:
    """Each class counts once: CE of the mean features (2, 0) and (0, 3) under the identity; class 2 is absent."""
    z, W = tensor([[1.0, 0], [3, 0], [0, 3]]), tensor([[1.0, 0], [0, 1], [0, 0]])
    expected = (math.log(1 + 2 * math.exp(-2)) + math.log(1 + 2 * math.exp(-3))) / 2
    assert float(of_class_means(z, tensor([0, 0, 1]), 3, lambda mean: linear(mean, W))) == pytest.approx(
        expected, abs=1e-6
    )


@settings(max_examples=10, deadline=None)
@given(seeds, st.sampled_from(["logits", "probabilities"]))
def test_batch_prototypes_of_any_head_are_classified_after_the_mean(seed: int, over: Any) -> None:
    z, y, head = (
        normal(seed, 12, 5),
        some(seed, 12, 6),
        FineHead(normal(seed + 1, 18, 5), normal(seed + 2, 18), 3, over),
    )
    present = y.unique()
    means = torch.stack([z[y == c].mean(0) for c in present])
    assert_close(of_class_means(z, y, 6, head), cross_entropy(head(means), present))


# Eqs. 8, 9: distillation

TEACHER, STUDENT = tensor([[2.0, 1.0, 0.1]]), tensor([[1.5, 0.5, 0.3]])


@pytest.mark.parametrize(
    ("method", "expected"),
    [(FedCD(xi=0.5), 0.034932), (FedCD(xi=8), 0.444804), (FedCD(distil="kd"), 0.026243)],
    ids=["xi=.5", "xi=8", "kd"],
)
def test_distillation_is_tckd_plus_xi_nckd(method: FedCD, expected: float) -> None:
    """TCKD .007607, NCKD .054650; KD = TCKD + (1 - .659001) NCKD = .026243."""
    assert float(method.distilled(STUDENT, TEACHER, FIRST)) == pytest.approx(expected, abs=1e-6)
    assert float(method.distilled(TEACHER, TEACHER, FIRST)) == pytest.approx(0, abs=1e-6)
    tckd, nckd = decoupled(STUDENT, TEACHER, FIRST)
    assert (float(tckd), float(nckd)) == (pytest.approx(0.007607, abs=1e-6), pytest.approx(0.054650, abs=1e-6))
    assert float(tckd + (1 - 0.659001) * nckd) == pytest.approx(0.026243, abs=1e-6)


def test_with_two_classes_the_not_true_term_is_zero() -> None:
    assert float(decoupled(STUDENT[:, :2], TEACHER[:, :2], FIRST)[1]) == 0


# W and the head of fine classes

FINE_LOGITS = tensor([[1.0], [2.0], [0.5], [-1.0]])  # two classes of two, one feature


@pytest.mark.parametrize(
    ("over", "logits", "loss", "gradient"),
    [
        ("logits", [3.0, -0.5], 0.029750, [-0.029312, -0.029312, 0.029312, 0.029312]),
        ("probabilities", [2.313262, 0.701413], 0.181920, [-0.044734, -0.121599, 0.135989, 0.030343]),
    ],
)
def test_a_class_adds_the_logits_or_the_probabilities_of_its_fine_classes(
    over: Any, logits: list[float], loss: float, gradient: list[float]
) -> None:
    """Fine logits (1, 2 | .5, -1): sums (3, -.5); probabilities (.833668, .166332), of which -log is .181920."""
    head = FineHead(FINE_LOGITS.clone(), None, 2, over)
    found = head(torch.ones(1, 1))
    assert found[0].tolist() == pytest.approx(logits, abs=1e-6)
    value = cross_entropy(found, FIRST)
    assert value.item() == pytest.approx(loss, abs=1e-6)
    value.backward()
    assert head.weight.grad is not None
    assert head.weight.grad.flatten().tolist() == pytest.approx(gradient, abs=1e-6)
    p = FINE_LOGITS.flatten().softmax(0).view(2, 2).sum(1)
    if over == "probabilities":
        assert_close(found.softmax(1)[0], p)


def test_over_logits_the_vectors_of_a_class_stay_as_far_apart_as_they_started() -> None:
    """They get identical gradients: a plain head with M times the learning rate. Over probabilities they do not."""
    apart = {}
    for over in ("logits", "probabilities"):
        world = small(FedCD(W=over, classifier="mean", rho=0))  # type: ignore[arg-type]
        first, last = start(world)["parameters"]["head.weight"], rounds(world, 2)[0][-1].server["parameters"]
        first, then = (t.view(10, 3, 12) for t in (first, last["head.weight"]))
        assert not torch.allclose(first, then, atol=1e-3)
        apart[over] = float(((then - then[:, :1]) - (first - first[:, :1])).abs().max())
    assert apart["logits"] < 1e-5
    assert apart["probabilities"] > 1e-3


def test_over_logits_it_is_a_plain_head_with_m_times_the_learning_rate() -> None:
    """One step with lr of M = 3 vectors that add up to a plain head's rows, and of that head with 3 lr."""
    fine, z, y = FineHead(normal(0, 12, 5), None, 3, "logits"), normal(1, 8, 5), some(2, 8, 4)
    plain = FineHead(fine.weight.detach().view(4, 3, 5).sum(1), None, 1, "logits")
    for head, lr in ((fine, 0.1), (plain, 0.3)):
        (gradient,) = torch.autograd.grad(cross_entropy(head(z), y), head.weight)
        head.weight.data -= lr * gradient
    assert_close(fine(z), plain(z))


@pytest.mark.parametrize("over", ["logits", "probabilities"])
def test_class_vectors_start_as_linear_layers_do_the_first_as_the_net_s_own(over: Any) -> None:
    plain = nn.Linear(16, 3)
    head = split_head(plain, 500, torch.Generator().manual_seed(1), bias=True, over=over)
    for t, own in (
        (head.weight.detach().view(3, 500, 16), plain.weight),
        (head.bias.detach().view(3, 500), plain.bias),
    ):
        assert torch.equal(t[:, 0], own)
        others = t[:, 1:]
        assert float(others.abs().max()) <= 0.25
        assert float(others.std()) == pytest.approx(0.25 / math.sqrt(3), rel=0.03)
    assert split_head(plain, 2, torch.Generator(), bias=False, over=over).bias is None


@pytest.mark.parametrize("over", ["logits", "probabilities"])
def test_one_fine_class_is_the_plain_head_to_the_bit_and_draws_nothing(over: Any) -> None:
    plain, rng, z = nn.Linear(5, 3), torch.Generator().manual_seed(1), normal(0, 4, 5)
    head = split_head(plain, 1, rng, bias=True, over=over)
    assert torch.equal(rng.get_state(), torch.Generator().manual_seed(1).get_state())
    assert torch.equal(head(z), plain(z))
    assert {name: p.shape for name, p in head.named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}


def test_every_site_makes_the_same_head_from_the_seed() -> None:
    a, b, c = (small(FedCD(), seed=seed).net.head for seed in (0, 0, 1))
    assert isinstance(a, FineHead)
    assert torch.equal(a.weight, b.weight)
    assert not torch.equal(a.weight, c.weight)
    assert a.weight.shape == (30, 12)


def test_a_model_has_no_bias_unless_asked() -> None:
    for bias in (False, True):
        records, _ = rounds(small(FedCD(bias=bias)), 2)
        assert ("head.bias" in records[-1].server["parameters"]) == bias


def test_a_net_whose_head_is_not_linear_is_rejected_with_one_sentence() -> None:
    net = Net(nn.Identity(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 10)), 3)
    with pytest.raises(UsageError, match="linear"):
        FedCD().prepare(net, seeded(0))


# k-means


def blobs(seed: int, sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Classes of three blobs far apart; features, labels, blobs."""
    y = torch.cat([torch.full((n,), c) for c, n in enumerate(sizes)])
    blob = torch.arange(len(y)) % 3
    centres = 40 * torch.eye(3)[blob] + 100 * y[:, None]
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    return (centres + normal(seed, len(y), 3))[order], y[order], blob[order]


def test_k_means_finds_blobs_in_every_class() -> None:
    """Three samples at random may start in one blob; of a few seeds most do not."""
    found = 0
    for seed in range(8):
        z, y, blob = blobs(seed, [30, 0, 30])
        fine = k_means(z, y, 3, 3, torch.Generator().manual_seed(seed))
        assert torch.equal(fine // 3, y)
        found += len(torch.stack([fine, y * 3 + blob]).unique(dim=1).T) == 6
    assert found >= 2


def test_a_class_with_fewer_samples_than_m_has_one_centre_a_sample() -> None:
    z, y = normal(0, 7, 4), tensor([0, 0, 2, 0, 0, 0, 2])
    fine = k_means(z, y, 3, 3, torch.Generator().manual_seed(0))
    centres = class_means(z, fine, 9)
    assert (centres["count"] > 0).view(3, 3).sum(1).tolist() == [3, 0, 2]
    assert_close(sorted(centres["mean"][6:8].tolist()), sorted(z[[2, 6]].tolist()))


def test_k_means_with_one_centre_is_the_class_mean_and_draws_nothing() -> None:
    z, y, rng = normal(0, 9, 4), some(0, 9, 3), torch.Generator().manual_seed(3)
    assert torch.equal(k_means(z, y, 3, 1, rng), y)
    assert torch.equal(rng.get_state(), torch.Generator().manual_seed(3).get_state())


def test_k_means_depends_on_the_generator_alone() -> None:
    z, y = normal(0, 60, 4), some(0, 60, 2)
    runs = [k_means(z, y, 2, 3, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_lloyd_s_steps_are_scikit_learn_s_in_each_class() -> None:
    z, y = normal(0, 80, 4) + 5, some(0, 80, 2)
    start = y * 3 + some(1, 80, 3)
    found = class_means(z, lloyd(z, y, start, 2, 3), 6)["mean"]
    for c in (0, 1):
        init = class_means(z, start, 6)["mean"][3 * c : 3 * c + 3]
        wanted = KMeans(3, init=init.numpy(), n_init=1, max_iter=20, tol=0, algorithm="lloyd").fit(z[y == c].numpy())
        assert_close(found[3 * c : 3 * c + 3], torch.from_numpy(wanted.cluster_centers_).float(), atol=1e-4, rtol=0)


def test_an_empty_cluster_gets_no_samples() -> None:
    """Centres 2 and 10; the third has no samples and is not at 0, where .5 would join it."""
    fine = lloyd(tensor([[0.5], [3.5], [10.0]]), torch.zeros(3, dtype=torch.int64), tensor([0, 0, 1]), 1, 3)
    assert fine.tolist() == [0, 0, 1]


def test_equal_samples_make_one_cluster() -> None:
    fine = k_means(torch.ones(5, 2), torch.zeros(5, dtype=torch.int64), 1, 3, torch.Generator())
    assert fine.unique().tolist() == [0]


def test_classes_without_prototypes_start_from_k_means_and_the_others_stay() -> None:
    """Class 0 has two known prototypes, class 1 none: its two samples become its centres."""
    z, y = tensor([[2.0, 0.1], [5.0, 5.0], [0.0, 9.0], [-3.0, 1.0]]), tensor([0, 1, 0, 1])
    known = tensor([True, True, False, False])
    fine, own = assign_fine_classes(z, y, Tensors(mean=P4, known=known), 2, torch.Generator().manual_seed(0))
    assert fine[[0, 2]].tolist() == [0, 1]
    assert set(fine[[1, 3]].tolist()) == {2, 3}
    assert torch.equal(own["mean"][:2], P4[:2])
    assert_close(own["mean"][fine[[1, 3]]], z[[1, 3]])
    assert own["known"].all()


def test_a_class_with_some_known_prototypes_uses_only_those() -> None:
    known = tensor([False, True, False, False])
    fine, own = assign_fine_classes(P4, tensor([0, 0, 0, 0]), Tensors(mean=P4, known=known), 2, torch.Generator())
    assert fine.tolist() == [1] * 4
    assert torch.equal(own["known"], known)


# Eqs. 10, 11: the whole loss


def middle(over: Any = "logits") -> tuple[Site, Payload, Net, Tensor, Tensor, Tensor]:
    """A client in the second of three rounds, moved away from what it received; one batch with fine labels."""
    site = small(FedCD(W=over)).site(1, 1, "train")
    site.load(server())
    fine, own = assign_fine_classes(site.infer(site.net.body), site.data.labels, server()[GROUP], 3, site.rng)
    head = GuidedHead(copy.deepcopy(site.net.head), own["mean"])
    with torch.no_grad():
        for i, p in enumerate(head.parameters()):
            p.add_(0.3 * normal(i, *p.shape))
    return site, server(), Net(site.net.body, head, 12), site.data.take(torch.arange(16))[0], fine[:16], own["known"]


def step(method: FedCD, scene: Any) -> tuple[float, dict[str, Tensor]]:
    """Value and gradients of the loss."""
    site, broadcast, net, x, fine, known = scene
    loss = method.loss(site, broadcast, net.head, known)(net, x, fine)
    return loss.item(), gradients(net, loss)


def gradients(net: Net, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*net.requires_grad_().named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, found, strict=True)}


def class_scores(z: Tensor, weight: Tensor, method: FedCD) -> Tensor:
    """u of features z [n, d], with W over logits or over probabilities."""
    each = (z @ weight.T).view(len(z), -1, method.M)
    return each.sum(2) if method.W == "logits" else each.exp().sum(2).log()


def everyone(g: Tensors, importance: float) -> dict[int, float]:
    """All prototypes that have samples, with this sum of importance."""
    n = float(g["count"].sum())
    return {j: importance * float(c) / n for j, c in enumerate(g["count"]) if c > 0 and importance}


def by_hand(method: FedCD, scene: Any, mu: float, appended: dict[int, float]) -> Tensor:
    """Eq. 11 with loops over samples and prototypes; `appended` has the importance of each that is in the batch."""
    _, broadcast, net, x, fine, known = scene
    M, g, phi_g = method.M, broadcast[GROUP], broadcast["parameters"]["head.weight"]
    z = net.body(x)
    samples = [(z[i], int(fine[i]), 1.0) for i in range(len(x))]
    everything = samples + [(g["mean"][j], j, importance) for j, importance in appended.items()]
    N = sum(importance for _, _, importance in everything)
    total = torch.zeros(())
    for feature, j, importance in everything:
        c = tensor([j // M])
        u = class_scores(feature[None], net.head.head.weight, method)
        u_g = class_scores(feature[None], phi_g, method).detach()
        s = (cosine_similarity(feature[None], net.head.prototypes) / method.tau).exp()
        same_class = torch.arange(len(s)) // M == j // M
        own = torch.arange(len(s)) == j
        weights = torch.where(same_class, method.alpha, 1 - method.alpha).masked_fill(own, 1.0).masked_fill(~known, 0.0)
        hpc = -(s[j] / (weights * s).sum()).log()
        tckd, nckd = decoupled(u, u_g, c)
        gid = tckd[0] + method.xi * nckd[0]
        total = total + importance / N * (mu * cross_entropy(u, c) + (1 - mu) * hpc + method.lam * gid)
    y = fine // M
    means = [class_scores(z[y == c].mean(0, keepdim=True), phi_g, method) for c in y.unique()]
    return total + method.gamma * cross_entropy(torch.cat(means), y.unique())


@pytest.mark.parametrize("over", ["logits", "probabilities"])
@pytest.mark.parametrize("rho", [0.0, 1.0, 2.5, "paper"])
def test_the_loss_is_eq_11_in_value_and_gradient(rho: Any, over: Any) -> None:
    method = FedCD(mu="linear", rho=rho, gamma=0.6, lam=0.7, tau=0.5, xi=2.0, W=over)
    scene = middle(over)
    site, g = scene[0], scene[1][GROUP]
    if rho == "paper":
        drawn = drawn_prototypes(g["count"], 16, len(site.data), site.rng.clone_state())
        appended = {int(j): float(g["count"][j]) for j in drawn}
        assert 0 < len(appended) < int((g["count"] > 0).sum())
    else:
        appended = everyone(g, 16 * rho)
    value, found = step(method, scene)
    wanted = by_hand(method, scene, 2 / 3, appended)
    assert value == pytest.approx(wanted.item(), rel=1e-5)
    for name, gradient in gradients(scene[2], wanted).items():
        assert_close(found[name], gradient, rtol=1e-3, atol=1e-6)


def test_two_thirds_of_algorithm_1_s_batches_hold_no_prototype_at_the_paper_s_scale() -> None:
    """5,000 samples in batches of 64, 30 prototypes: (1 - 64 / 5000)^30 = .68. Each comes once an epoch on average."""
    count, rng = torch.ones(30), seeded(0)
    drawn = [drawn_prototypes(count, 64, 5000, rng) for _ in range(4000)]
    assert sum(len(one) == 0 for one in drawn) / 4000 == pytest.approx((1 - 64 / 5000) ** 30, abs=0.03)
    assert pytest.approx(0.68, abs=0.005) == (1 - 64 / 5000) ** 30
    assert float(torch.bincount(torch.cat(drawn), minlength=30).float().mean()) * 5000 / 64 / 4000 == pytest.approx(
        1, abs=0.05
    )
    count[3:] = 0
    assert set(torch.cat([drawn_prototypes(count, 5, 5, rng) for _ in range(3)]).tolist()) == {0, 1, 2}


def test_the_four_losses_have_the_weights_of_eq_11(monkeypatch: pytest.MonkeyPatch) -> None:
    """.75 * .7 + .25 * 1.2 + .1 * .9 + .1 * .3 = .945 with mu = 1 - 1/4."""
    scene = middle()
    values: dict[str, Callable[..., Tensor]] = {
        "cross_entropy": lambda u, c, reduction: torch.full((len(u),), 0.7),
        "hierarchical_contrast": lambda z, *_: torch.full((len(z),), 1.2),
        "of_class_means": lambda *_: tensor(0.9),
    }
    for name, value in values.items():
        monkeypatch.setattr(fedcd, name, value)
    monkeypatch.setattr(FedCD, "distilled", lambda self, u, u_g, c: torch.full((len(u),), 0.3))
    site, broadcast, net, x, fine, known = scene
    loss = FedCD(mu="linear").loss(replace(site, round=1, rounds=4), broadcast, net.head, known)
    assert loss(net, x, fine).item() == pytest.approx(0.945)


def test_mu_falls_from_1_in_steps_of_1_over_the_rounds_or_stays() -> None:
    site = small(FedCD()).site(0, 0, "train")
    for method in (FedCD(mu="linear"), FedCD(preset="paper")):
        assert [method.mu_at(replace(site, round=t, rounds=4)) for t in range(4)] == [1, 0.75, 0.5, 0.25]
    for method, mu in ((FedCD(mu=0.5), 0.5), (FedCD(), 0.9)):
        assert [method.mu_at(replace(site, round=t, rounds=4)) for t in range(4)] == [mu] * 4


@pytest.mark.parametrize(("rho", "held"), [(2.0, 2), (2.0, 7), ("paper", 2)])
def test_a_prototype_weighs_as_many_samples_as_its_importance(rho: Any, held: int) -> None:
    """CE of two samples .2 and .6, of one prototype 1.0 with I = 4: (.2 + .6 + 4) / 6 = .8.

    `paper`: 4 samples behind the prototype, so I = 4; the client has one batch, so the prototype is in it.
    """
    u = -torch.log(torch.expm1(tensor([0.2, 0.6, 1.0])))  # log(1 + e^-u) = ce
    z = torch.stack([u, torch.zeros(3)], 1)
    g = Tensors(mean=z[2:].repeat(2, 1), count=tensor([4.0, 0.0]), known=tensor([True, False]))
    site, broadcast, net = alone_with(z[:2], FIRST.repeat(held), g, torch.eye(2))
    method = FedCD(M=1, gamma=0, lam=0, mu=1.0, rho=rho)
    both = method.loss(site, broadcast, net.head, g["known"])(net, z[:2], FIRST.repeat(2))
    assert both.item() == pytest.approx(0.8)
    alone = replace(method, rho=0).loss(site, broadcast, net.head, g["known"])(net, z[:2], FIRST.repeat(2))
    assert alone.item() == pytest.approx(0.4)


def alone_with(z: Tensor, y: Tensor, g: Tensors, weight: Tensor, M: int = 1) -> tuple[Site, Payload, Net]:
    """A site whose samples are features, what it received, and the net it trains."""
    net = Net(nn.Identity(), FineHead(weight, None, M, "logits"), 2)
    broadcast = {"parameters": Tensors({"head.weight": weight.clone()}), GROUP: g}
    data = Data(z, y, torch.arange(len(y)))
    site = Site(net, data, Training(), len(weight) // M, 1, broadcast, seeded(0), rounds=2)
    return site, broadcast, Net(nn.Identity(), GuidedHead(net.head, g["mean"].clone()), 2)


def test_fine_classes_may_be_assigned_in_every_batch() -> None:
    """The received labels' classes count, not their fine classes; Eq. 2 with the prototypes of the round's start."""
    method = FedCD(mu="linear", rho=1.0, assign="batch", gamma=0.6, tau=0.5)
    scene = middle()
    site, broadcast, net, x, fine, known = scene
    moved = most_similar(net.body(x).detach(), fine // 3, net.head.prototypes.detach(), known, 3)
    shuffled = fine // 3 * 3 + (fine + 1) % 3
    assert step(method, (site, broadcast, net, x, shuffled, known))[0] == pytest.approx(
        by_hand(method, (site, broadcast, net, x, moved, known), 2 / 3, everyone(broadcast[GROUP], 16)).item(), rel=1e-5
    )


def test_batches_are_assigned_by_the_prototypes_of_the_round_s_start_even_after_they_have_moved() -> None:
    """The trained prototypes are those of the start in reverse order by now; Eq. 2 still sees the start."""
    method = FedCD(mu="linear", rho=1.0, assign="batch", gamma=0.6, tau=0.5)
    site, broadcast, net, x, fine, known = scene = middle()
    loss = method.loss(site, broadcast, net.head, known)
    start = net.head.prototypes.detach().clone()
    with torch.no_grad():
        net.head.prototypes.copy_(start.flip(0))
    assigned = most_similar(net.body(x).detach(), fine // 3, start, known, 3)
    assert not torch.equal(assigned, most_similar(net.body(x).detach(), fine // 3, start.flip(0), known, 3))
    wanted = by_hand(method, (*scene[:4], assigned, known), 2 / 3, everyone(broadcast[GROUP], 16)).item()
    assert loss(net, x, fine).item() == pytest.approx(wanted, rel=1e-5)


def test_a_batch_assigns_no_sample_to_an_unknown_prototype() -> None:
    """z = (-1, 0) has cosine -1 with the known prototype (1, 0) and 0 with the unknown one, which is zeros.

    Assigned to the known one, which is alone in the sum of Eq. 3, omega = 1 and the loss is 0.
    """
    z, known = tensor([[-1.0, 0.0]]), tensor([True, False])
    g = Tensors(mean=tensor([[1.0, 0.0], [0.0, 0.0]]), count=torch.zeros(2), known=known)
    site, broadcast, net = alone_with(z, tensor([0]), g, torch.ones(2, 2), M=2)
    method = FedCD(M=2, gamma=0, lam=0, mu=0.0, rho=0, assign="batch")
    loss = method.loss(site, broadcast, net.head, known)(net, z, tensor([0]))
    assert loss.item() == pytest.approx(0.0, abs=1e-6)


# Who trains what


def body(found: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten() for name, g in found.items() if name.startswith("body.")])


@pytest.mark.parametrize(
    ("method", "moved"),
    [
        (FedCD(mu=1.0, gamma=0, lam=0), {"body", "head.head.weight"}),
        (FedCD(mu=0.0, gamma=0, lam=0), {"body", "head.guides.0"}),
        (FedCD(mu=0.0, gamma=1, lam=0, hpc=False), {"body"}),
        (FedCD(mu=0.0, gamma=0, lam=1, hpc=False), {"body", "head.head.weight"}),
        (FedCD(mu=0.0, gamma=0, lam=1, hpc=False, distil="kd"), {"body", "head.head.weight"}),
    ],
    ids=["dcl", "hpc", "bpr", "gid", "kd"],
)
def test_each_loss_trains_what_it_should(method: FedCD, moved: set[str]) -> None:
    scene = middle()
    _, found = step(method, scene)
    assert {name.split(".")[0] if name.startswith("body") else name for name, g in found.items() if g.any()} == moved
    assert not any(t.requires_grad for tensors in scene[1].values() for t in tensors.values())


def test_global_prototypes_train_the_classifier_and_p_k_and_never_the_body() -> None:
    """With sum I = rho B the samples' share is 1 / (1 + rho): the body's gradient is that share of its own."""
    method = FedCD(gamma=0, lam=0.5, rho=3.0)
    scene = middle()
    with_them, without = step(method, scene)[1], step(replace(method, rho=0), scene)[1]
    assert_close(body(with_them) * 4, body(without), rtol=1e-4, atol=1e-6)
    for name in ("head.head.weight", "head.guides.0"):
        assert not torch.allclose(with_them[name] * 4, without[name], rtol=1e-2, atol=1e-4)


def test_prototypes_do_not_decay() -> None:
    """What the optimiser will add to the gradient is taken off it; the loss's value stays."""
    scene = middle()
    decaying = replace(scene[0], training=replace(scene[0].training, weight_decay=0.3))
    value, found = step(FedCD(), scene)
    other, decayed = step(FedCD(), (decaying, *scene[1:]))
    assert value == other
    P = scene[2].head.prototypes.detach()
    assert_close(decayed.pop("head.guides.0"), found.pop("head.guides.0") - 0.3 * P)
    assert all(torch.equal(decayed[name], found[name]) for name in found)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_prototypes_without_a_gradient_are_sent_unchanged_despite_weight_decay(fast: bool, momentum: float) -> None:
    """tau = 1e9 leaves nothing of L_hpc's gradient. A clipped step would keep a part of the decay."""
    method = FedCD(tau=1e9, mu=0.5, clip="off")
    training = Training(lr=0.1, batch_size=16, weight_decay=0.1, momentum=momentum)
    update = small(method, training=training, fast=fast).train_client(0, 1, "train", server(), {}).update
    assert_close(update.payload[GROUP]["mean"], server()[GROUP]["mean"], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(
        update.payload["parameters"]["head.weight"], server()["parameters"]["head.weight"], rtol=1e-2
    )


# The client's round


def start(world: World) -> Payload:
    return world.method.broadcast(world.method.init_server(world.server_site(0, "init")))


@pytest.mark.parametrize("preset", ["robust", "paper"])
def test_the_first_round_sends_k_means_centres_of_the_trained_features(preset: Any) -> None:
    """Lloyd's steps go on from the fine classes of the round's start."""
    world = small(FedCD(preset=preset, mu="linear"))
    broadcast = start(world)
    update = world.train_client(2, 0, "train", broadcast, {}).update
    site = world.site(2, 0, "train")
    site.load(broadcast)
    fine, _ = assign_fine_classes(site.infer(site.net.body), site.data.labels, broadcast[GROUP], 3, site.rng)
    z = site.infer(site.frozen(model_of(update.payload)).body)
    assert_close(update.payload[GROUP], class_means(z, lloyd(z, site.data.labels, fine, 10, 3), 30))


def test_prototypes_of_an_untrained_net_are_nearly_one_vector_and_those_sent_are_not() -> None:
    """Images of two classes, bright or dark in one corner: the features of a convolutional net's random start differ
    by little, and L_hpc only turns prototypes, so those of the start would stay short."""
    x = torch.randint(90, 110, (64, 28, 28, 1), generator=seeded(0), dtype=torch.uint8)
    y = torch.arange(64) % 2
    x[y == 1, :14] += 100
    training = Training(lr=0.05, momentum=0.9, batch_size=16, epochs=10)
    world = world_from_tensors(
        FedCD(preset="paper"), training, partial(build, "simple-cnn", (1, 28, 28), 2, seed=0), x, y,
        [torch.arange(64).numpy()], classes=2, rounds=2, mean=(0.5,), std=(0.5,),
    )  # fmt: skip
    broadcast, site = start(world), world.site(0, 0, "train")
    site.load(broadcast)
    before = class_means(site.infer(site.net.body), y, 2)["mean"]
    sent = world.train_client(0, 0, "train", broadcast, {}).update.payload[GROUP]
    after = torch.stack([sent["mean"][3 * c : 3 * c + 3][sent["count"][3 * c : 3 * c + 3] > 0].mean(0) for c in (0, 1)])
    assert cosine_similarity(before[:1], before[1:]).item() > 0.99
    assert cosine_similarity(after[:1], after[1:]).item() < 0.9
    assert float(after.norm(dim=1).min()) > 2 * float(before.norm(dim=1).max())


@pytest.mark.parametrize("round", [0, 1])
def test_counts_of_a_class_s_fine_classes_add_up_to_its_samples(round: int) -> None:
    world = small(FedCD())
    broadcast = start(world) if round == 0 else server()
    for client in range(5):
        count = world.train_client(client, round, "train", broadcast, {}).update.payload[GROUP]["count"]
        held = torch.bincount(world.site(client, round, "train").data.labels, minlength=10)
        assert count.view(10, 3).sum(1).tolist() == held.tolist()


def second_round(method: FedCD, training: Training | None = None) -> tuple[Payload, Site, Tensor]:
    """One client's update, its site with what it received, and the fine classes of its samples."""
    world = small(method, training=training)
    update, site = world.train_client(1, 1, "train", server(), {}).update, world.site(1, 1, "train")
    site.load(server())
    g = server()[GROUP]
    return update.payload, site, most_similar(site.infer(site.net.body), site.data.labels, g["mean"], g["known"], 3)


@pytest.mark.parametrize("assign", ["round", "batch"])
def test_a_round_of_one_step_is_one_step_down_eq_11(assign: Any) -> None:
    """All samples in one batch: each of theta, phi and P^k moves by lr times its gradient, fine classes as assigned."""
    method, lr = FedCD(mu="linear", rho=1.0, assign=assign, tau=0.2, clip="off"), 0.5
    update, site, fine = second_round(method, Training(lr=lr, batch_size=1000))
    head = GuidedHead(site.net.head, server()[GROUP]["mean"].clone())
    net, x = Net(site.net.body, head, 12), site.data.take(torch.arange(len(fine)))[0]
    loss = by_hand(
        method, (site, server(), net, x, fine, server()[GROUP]["known"]), 2 / 3, everyone(server()[GROUP], len(fine))
    )
    pull = gradients(net, loss)
    assert pull["head.guides.0"].norm() > 0.01
    assert_close(update[GROUP]["mean"], head.prototypes.detach() - lr * pull["head.guides.0"], rtol=1e-4, atol=1e-5)
    moved = head.head.weight.detach() - lr * pull["head.head.weight"]
    assert_close(update["parameters"]["head.weight"], moved, rtol=1e-4, atol=1e-5)
    for name, p in net.body.named_parameters():
        moved = p.detach() - lr * pull[f"body.{name}"]
        assert_close(update["parameters"][f"body.{name}"], moved, rtol=1e-4, atol=1e-5)


def test_later_rounds_send_prototypes_that_learnt_and_counts_of_the_round_s_start() -> None:
    update, _, fine = second_round(FedCD(clip="off"))
    assert torch.equal(update[GROUP]["count"], torch.bincount(fine, minlength=30).float())
    moved = (update[GROUP]["mean"] - server()[GROUP]["mean"]).norm(dim=1)
    assert (moved[update[GROUP]["count"] > 0] > 1e-4).all()


def test_without_the_contrast_prototypes_are_the_mean_features_of_their_samples() -> None:
    update, site, fine = second_round(FedCD(hpc=False))
    z = site.infer(site.frozen(model_of(update)).body)
    assert_close(update[GROUP], class_means(z, fine, 30))


def test_rescaled_prototypes_keep_their_direction_and_have_their_samples_mean_norm() -> None:
    plain, site, fine = second_round(FedCD())
    own = second_round(FedCD(rescale=True))[0][GROUP]
    norms = site.infer(site.frozen(model_of(plain)).body).norm(dim=1)
    for j in fine.unique():
        assert float(own["mean"][j].norm()) == pytest.approx(float(norms[fine == j].mean()), rel=1e-4)
    held = own["count"] > 0
    assert_close(cosine_similarity(own["mean"][held], plain[GROUP]["mean"][held]), torch.ones(int(held.sum())))


# The server


def update_of(phi: Tensor, P: Tensor, count: Tensor, weight: float = 1.0, w: float = 0.0) -> Update:
    """A client's update with class-vectors [C M, d] and a body of one number."""
    parameters = Tensors({"body.w": tensor([w]), "head.weight": phi})
    return Update({"parameters": parameters, GROUP: Tensors(mean=P, count=count)}, weight)


def server_of(phi: Tensor, P: Tensor, known: Tensor) -> Payload:
    first = update_of(phi, P, torch.zeros(len(P))).payload
    return first | {GROUP: first[GROUP] | {"known": known}}


SITE: Any = None  # aggregation does not look at it


def test_prototypes_are_pooled_by_the_counts_of_their_fine_class() -> None:
    """(10 (1, 2) + 30 (3, 6)) / 40 = (2.5, 5); without any the last value stays, with importance 0; else unknown."""
    phi = torch.zeros(3, 2)
    old = server_of(phi, tensor([[7.0, 7], [8, 8], [9, 9]]), tensor([False, True, False]))
    sent = [([1.0, 2.0], 10.0), ([3.0, 6.0], 30.0), ([9.0, 9.0], 0.0)]
    updates = [update_of(phi, tensor([p, [5.0, 5], [4, 4]]), tensor([n, 0, 0])) for p, n in sent]
    g = FedCD(M=1).aggregate(SITE, old, iter(updates))[GROUP]
    assert g["mean"][:2].tolist() == [[2.5, 5.0], [8.0, 8.0]]
    assert g["count"].tolist() == [40, 0, 0]
    assert g["known"].tolist() == [True, True, False]


def test_class_weights_are_the_softmax_of_quality_over_clients() -> None:
    """q = (.9, .5, .1) -> (.471776, .316241, .211983); (1, 0), (0, 1), (2, 2) -> (.895742, .740206)."""
    nu = client_weights(tensor([0.9, 0.5, 0.1]).log(), 1.0, norm=False)
    assert nu.tolist() == pytest.approx([0.471776, 0.316241, 0.211983], abs=1e-6)
    phis = [Tensors(weight=tensor([v])) for v in ([1.0, 0.0], [0.0, 1.0], [2.0, 2.0])]
    vector = combine_classifiers(phis, nu[:, None])["weight"].flatten().tolist()
    assert vector == pytest.approx([0.895742, 0.740206], abs=1e-6)


def test_one_perfect_client_of_ten_gets_at_most_e_times_the_weight_of_the_others() -> None:
    log_q = tensor([1.0] + [0.0] * 9).log()
    assert client_weights(log_q, 1.0, norm=False).tolist() == pytest.approx([0.231969] + [0.085337] * 9, abs=1e-6)
    assert client_weights(log_q, 0.01, norm=False)[0] == pytest.approx(1)
    assert client_weights(log_q, 1.0, norm=True).tolist() == [1.0] + [0.0] * 9
    assert client_weights(torch.full((4,), 0.3).log(), 1.0, norm=False).tolist() == [0.25] * 4
    q = tensor([0.3, 0.1])
    assert_close(client_weights(q.log(), 1.0, norm=True), tensor([0.75, 0.25]))


def test_quality_is_the_probability_of_the_own_fine_class_among_all() -> None:
    phi, P = Tensors({"head.weight": normal(0, 6, 4), "head.bias": normal(1, 6)}), normal(2, 6, 4)
    for used in (phi, Tensors({"head.weight": phi["head.weight"]})):
        bias = used.get("head.bias", torch.zeros(6))
        for j in range(6):
            logits = [float(P[j] @ phi["head.weight"][i] + bias[i]) for i in range(6)]
            q = math.exp(logits[j]) / sum(map(math.exp, logits))
            assert float(log_quality(used, P)[j].exp()) == pytest.approx(q, rel=1e-5)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("rule", ["acla", "norm", "cla", "mean"])
def test_each_class_vector_is_averaged_by_its_own_weights(rule: Any, known: bool) -> None:
    """Three clients, two classes of two; of the last fine class no client has a sample, in this round or ever."""
    phis = [normal(i, 4, 3) for i in range(3)]
    P = [normal(10 + i, 4, 3) for i in range(3)]
    held = [tensor([4.0, 1, 0, 0]), tensor([0.0, 1, 5, 0]), tensor([6.0, 0, 5, 0])]
    sizes = [5.0, 6.0, 11.0]
    old = server_of(torch.zeros(4, 3), normal(20, 4, 3), tensor([False, False, False, known]))
    updates = [update_of(phis[k], P[k], held[k], sizes[k], w=float(k)) for k in range(3)]
    fresh = FedCD(M=2, classifier=rule, acla_temp=0.5).aggregate(SITE, old, iter(updates))
    by_samples = tensor(sizes) / 22
    new = fresh[GROUP]["mean"]  # Eq. 13 looks at the new P^g
    q = torch.stack([log_quality(Tensors({"head.weight": phi}), new).exp() for phi in phis])
    nu = {
        "acla": (q / 0.5).softmax(0),
        "norm": q / q.sum(0),
        "cla": torch.stack(held) / torch.stack(held).sum(0),
        "mean": by_samples[:, None].expand(3, 4),
    }[rule].clone()
    if rule in ("cla", "mean") or not known:
        nu[:, 3] = by_samples
    assert_close(nu.sum(0), torch.ones(4))
    assert_close(fresh["parameters"]["head.weight"], sum(nu[k][:, None] * phis[k] for k in range(3)))
    assert float(fresh["parameters"]["body.w"]) == pytest.approx((6 + 22) / 22)


def test_one_client_s_classifier_becomes_the_server_s() -> None:
    phi, P = normal(0, 6, 4), normal(1, 6, 4)
    old = server_of(torch.zeros(6, 4), torch.zeros(6, 4), torch.zeros(6, dtype=torch.bool))
    for rule in ("acla", "norm", "cla", "mean"):
        fresh = FedCD(classifier=rule).aggregate(SITE, old, iter([update_of(phi, P, torch.ones(6))]))
        assert_close(fresh["parameters"]["head.weight"], phi)


def test_a_bias_takes_the_weights_of_its_class_vector() -> None:
    phis = [Tensors(weight=normal(k, 4, 3), bias=normal(5 + k, 4)) for k in range(2)]
    nu = tensor([[0.1, 0.2, 0.3, 0.4], [0.9, 0.8, 0.7, 0.6]])
    assert_close(combine_classifiers(phis, nu)["bias"], nu[0] * phis[0]["bias"] + nu[1] * phis[1]["bias"])


def test_classes_that_come_later_start_from_k_means_and_absent_ones_wait() -> None:
    """Client 0 alone, then client 1, whose two classes are others: the first two keep prototypes, importance 0."""
    world = small(FedCD(), split=PCDD)
    records, _ = rounds(world, 2, cohorts=[[0], [1]])
    first, second = (r.server[GROUP] for r in records)
    held = [torch.bincount(world.site(c, 0, "train").data.labels, minlength=10) > 0 for c in (0, 1)]
    for g, classes in ((first, held[0]), (second, held[0] | held[1])):
        assert torch.equal(g["known"].view(10, 3).any(1), classes)
    old = held[0].repeat_interleave(3)
    assert torch.equal(second["mean"][old], first["mean"][old])
    assert not second["count"][old].any()
    assert second["count"].sum() == len(world.site(1, 0, "train").data)
    assert second["known"][old].equal(first["known"][old])


@pytest.mark.parametrize("over", ["logits", "probabilities"])
def test_a_model_is_evaluated_and_personalised_with_the_head_of_fine_classes(over: Any) -> None:
    """Over probabilities no plain head predicts the same: the largest sum of softmaxed fine logits wins."""
    world = small(FedCD(W=over))
    records, simulation = rounds(world, 2)
    last = records[-1].server
    site = world.site(-1, 2, "evaluate")
    site.load(last)
    data = Data(world.x_test, world.y_test, torch.arange(len(world.y_test)), world.mean, world.std)
    fine = (site.infer(site.net.body, data) @ last["parameters"]["head.weight"].T).view(len(data), 10, 3)
    each = fine if over == "logits" else fine.flatten(1).softmax(1).view_as(fine)
    accuracy = float((each.sum(2).argmax(1) == world.y_test).float().mean())
    metrics = simulation.evaluate(1, world.method.broadcast(last))
    assert metrics.global_.accuracy == pytest.approx(accuracy)
    model = world.method.personalise(world.site(0, 2, "evaluate"), world.method.broadcast(last), {})
    assert model["parameters"]["head.weight"].shape == (30, 12)


def test_traffic_is_model_class_vectors_and_prototypes() -> None:
    """CIFAR-10: extractor 90056, class-vectors 30 * 256, prototypes 30 * 256 + 30, as many as the paper's."""
    net = FedCD().prepare(build("simple-cnn", (3, 32, 32), 10, seed=0), seeded(0))
    data = Data(torch.zeros(4, 32, 32, 3, dtype=torch.uint8), torch.arange(4), torch.arange(4), (0.5,) * 3, (0.25,) * 3)
    site = Site(net, data, Training(), 10, 1, {}, seeded(0))
    site.initial = site.model()
    down = FedCD().broadcast(FedCD().init_server(site))
    up = FedCD().client(site, down, {})[0].payload
    for payload, known in ((down, 30), (up, 0)):
        size = size_of(payload)
        assert size["parameters"] == 4 * (90056 + 7680)
        assert size[GROUP] == 4 * (7680 + 30) + known


# Against FedAvg, and its variants in a run


@pytest.mark.parametrize(
    "training",
    [
        Training(lr=0.1, batch_size=16),
        Training(lr=0.05, batch_size=7, epochs=2, momentum=0.9, weight_decay=0.01, clip=0.5),
        Training(optimiser="adam", lr=0.01, batch_size=16),
    ],
    ids=["sgd", "momentum", "adam"],
)
@pytest.mark.parametrize("fast", [True, False])
def test_without_its_terms_it_is_fedavg_bit_for_bit(training: Training, fast: bool) -> None:
    ours, _ = rounds(small(OFF, training=training, fast=fast), 2)
    plain, _ = rounds(small(FedAvg(), training=training, fast=fast), 2)
    assert same(model_of(ours[-1].server), model_of(plain[-1].server))


def test_the_first_round_of_mu_1_is_fedavg_bit_for_bit_with_batch_norm_and_prototypes_wait() -> None:
    """t = 0: neither L_hpc nor a prototype takes part."""
    method = replace(OFF, mu="linear", rho=1.0)
    few = Training(lr=0.1, batch_size=8, steps=2)
    ours, _ = rounds(digits(method, model="resnet8", training=few), 1)
    plain, _ = rounds(digits(FedAvg(), model="resnet8", training=few), 1)
    assert same(model_of(ours[0].server), model_of(plain[0].server))
    assert ours[0].server["buffers"]


def moved_in_one_step(method: FedCD, **options: Any) -> float:
    """How far a client's model moves in one step with lr 1 from a head 100 times too large."""
    world = small(method, training=Training(lr=1.0, batch_size=16, steps=1, **options))
    broadcast = start(world)
    before = broadcast["parameters"] | {"head.weight": 100 * broadcast["parameters"]["head.weight"]}
    update, _ = method.client(world.site(1, 0, "train"), broadcast | {"parameters": before}, {})
    after = update.payload["parameters"]
    return math.sqrt(sum(float((after[name] - before[name]).square().sum()) for name in before))


def test_a_step_is_clipped_by_default_but_not_in_the_paper_s_and_training_clip_goes_first() -> None:
    """lr 1 without momentum: a step is as long as its gradient. mu = 1: P^k has none."""
    assert moved_in_one_step(FedCD(mu=1.0)) == pytest.approx(5, rel=1e-3)
    assert moved_in_one_step(FedCD(mu=1.0, clip=0.5)) == pytest.approx(0.5, rel=1e-3)
    assert moved_in_one_step(FedCD(mu=1.0), clip=0.25) == pytest.approx(0.25, rel=1e-3)
    assert moved_in_one_step(FedCD(preset="paper")) > 10
    assert moved_in_one_step(FedCD(clip="off")) > 10


ON: dict[str, dict[str, Any]] = {
    "preset": {"preset": "paper"},
    "M": {"M": 2},
    "alpha": {"alpha": 0.4},
    "tau": {"tau": 0.3},
    "xi": {"xi": 8.0},
    "gamma": {"gamma": 0.0},
    "lam": {"lam": 0.0},
    "mu": {"mu": 0.5},
    "rho": {"rho": "paper"},
    "hpc": {"hpc": False},
    "distil": {"distil": "kd"},
    "classifier": {"classifier": "mean"},
    "norm": {"classifier": "norm"},
    "acla": {"classifier": "acla"},
    "acla_temp": {"acla_temp": 0.1, "classifier": "acla"},
    "W": {"W": "probabilities"},
    "clip": {"clip": 0.1},
    "assign": {"assign": "batch"},
    "rescale": {"rescale": True},
    "bias": {"bias": True},
}


@pytest.fixture(scope="module")
def usual() -> Payload:
    return rounds(small(FedCD()), 2)[0][-1].server


@pytest.mark.parametrize("name", ON)
def test_every_setting_changes_the_result_and_works_with_partial_participation(name: str, usual: Payload) -> None:
    method = settle(FedCD, {key: str(value) for key, value in ON[name].items()}, "fedcd")
    assert method == FedCD(**ON[name])
    records, _ = rounds(small(method), 2)
    assert not same(model_of(records[-1].server), model_of(usual))
    some_of_them, _ = rounds(small(method, split=PCDD), 2, cohorts=[[0], [0, 3]])
    for tensors in some_of_them[-1].server.values():
        assert all(t.isfinite().all() for t in tensors.values())


@pytest.mark.parametrize(
    ("preset", "said"),
    [
        ("robust", {"mu": 0.9, "rho": 0.1, "classifier": "cla", "clip": 5.0}),
        ("paper", {"mu": "linear", "rho": "paper", "classifier": "acla", "clip": "off"}),
    ],
)
def test_a_preset_is_what_its_settings_say_and_yields_to_a_setting(preset: Any, said: dict[str, Any]) -> None:
    named = rounds(small(FedCD(preset=preset)), 2)[0][-1].server
    for other in ("robust", "paper"):
        assert same(named, rounds(small(FedCD(preset=other, **said)), 2)[0][-1].server)


def test_all_settings_are_tried() -> None:
    assert {key for setting in ON.values() for key in setting} == {field.name for field in fields(FedCD)}


def test_it_learns() -> None:
    training = Training(lr=0.05, momentum=0.9, batch_size=16, epochs=2)
    world = digits(FedCD(), training=training, count=5)
    records, simulation = rounds(world, 5)
    broadcast = world.method.broadcast(records[-1].server)
    assert simulation.evaluate(4, broadcast).global_.accuracy > 0.8


def test_a_user_s_net_with_a_longer_head_is_refused_before_the_run() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10)))
    with pytest.raises(UsageError, match="fedcd needs a model whose head is one linear layer"):
        assemble(Experiment(FedCD(), model=net, head="1"))
