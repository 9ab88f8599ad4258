"""FedCD: Eqs. 1 to 15, who trains what, the fine classifier and its plain head, k-means."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache
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
from fedskew.federation.wire import size_of
from fedskew.federation.world import World
from fedskew.methods import fedcd
from fedskew.methods._shared.prototypes import GROUP, class_means
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.fedcd import FedCD
from fedskew.methods.fedcd.subclasses import (
    FINE,
    FineHead,
    assign_fine_classes,
    client_weights,
    combine_classifiers,
    fold,
    hierarchical_contrast,
    hierarchy,
    k_means,
    lloyd,
    log_quality,
    most_similar,
    of_class_means,
    split_head,
    unfold,
)
from fedskew.models import Net, build
from toys import digits, rounds, same

P4 = tensor([[1.0, 0.0], [0.6, 0.8], [-1.0, 0.0], [0.0, -1.0]])  # two classes of two
Z, FIRST, SECOND = tensor([[0.8, 0.6]]), tensor([0]), tensor([1])
ALL = torch.ones(4, dtype=torch.bool)
OFF = FedCD(M=1, gamma=0, lam=0, rho=0, mu=1.0, classifier="mean", bias=True)
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
    z = tensor([[1.0, 0], [3, 0], [0, 3]])
    W = tensor([[1.0, 0], [0, 1], [0, 0]])
    expected = (math.log(1 + 2 * math.exp(-2)) + math.log(1 + 2 * math.exp(-3))) / 2
    assert float(of_class_means(linear(z, W), tensor([0, 0, 1]))) == pytest.approx(expected, abs=1e-6)


@settings(max_examples=10, deadline=None)
@given(seeds)
def test_logits_of_means_are_means_of_logits(seed: int) -> None:
    z, y, W, b = normal(seed, 12, 5), some(seed, 12, 6), normal(seed + 1, 6, 5), normal(seed + 2, 6)
    present = y.unique()
    means = torch.stack([z[y == c].mean(0) for c in present])
    assert_close(of_class_means(linear(z, W, b), y), cross_entropy(linear(means, W, b), present))


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


# W, the fine classifier and its plain head


def test_a_class_logit_is_the_sum_of_its_fine_logits() -> None:
    """Fine logits (1, 2 | .5, -1) -> (3, -.5), CE .029750; all vectors of a class get one gradient."""
    head = FineHead(Tensors(weight=tensor([[[1.0], [2.0]], [[0.5], [-1.0]]])), torch.zeros(4, 1))
    logits = head(torch.ones(1, 1))
    assert logits.tolist() == [[3.0, -0.5]]
    loss = cross_entropy(logits, FIRST)
    assert loss.item() == pytest.approx(0.029750, abs=1e-6)
    loss.backward()
    assert head.weight.grad is not None
    assert head.weight.grad.flatten().tolist() == pytest.approx([-0.029312, -0.029312, 0.029312, 0.029312], abs=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_folding_makes_a_plain_head_of_the_same_logits_and_unfolding_takes_it_back(bias: bool) -> None:
    plain, rng = nn.Linear(5, 3, bias=True), torch.Generator().manual_seed(1)
    phi = split_head(plain, 4, rng, bias=bias)
    assert set(phi) == ({"weight", "bias"} if bias else {"weight"})
    assert_close(unfold(fold(phi)), phi)
    head, z = FineHead(phi, torch.zeros(12, 5)), normal(2, 7, 5)
    folded = fold(phi)["parameters"]
    assert_close(linear(z, folded["head.weight"], folded.get("head.bias")), head(z))
    assert_close(head.phi(), phi)


def test_class_vectors_start_as_linear_layers_do_the_first_as_the_net_s_own() -> None:
    plain = nn.Linear(16, 3)
    phi = split_head(plain, 500, torch.Generator().manual_seed(1), bias=True)
    assert torch.equal(phi["weight"][:, 0], plain.weight)
    assert torch.equal(phi["bias"][:, 0], plain.bias)
    for t in phi.values():
        others = t[:, 1:]
        assert float(others.abs().max()) <= 0.25
        assert float(others.std()) == pytest.approx(0.25 / math.sqrt(3), rel=0.03)


def test_one_fine_class_is_the_plain_head_to_the_bit_and_draws_nothing() -> None:
    plain, rng, z = nn.Linear(5, 3), torch.Generator().manual_seed(1), normal(0, 4, 5)
    phi = split_head(plain, 1, rng, bias=True)
    assert torch.equal(rng.get_state(), torch.Generator().manual_seed(1).get_state())
    assert torch.equal(FineHead(phi, torch.zeros(3, 5))(z), plain(z))
    assert same(model_of(fold(phi)), {"parameters": Tensors({f"head.{n}": p for n, p in plain.named_parameters()})})
    assert all(torch.equal(unfold(fold(phi))[name], phi[name]) for name in phi)


def test_a_server_s_model_is_the_folded_classifier_and_has_no_bias_unless_asked() -> None:
    for bias in (False, True):
        records, _ = rounds(small(FedCD(bias=bias)), 2)
        last = records[-1].server
        phi = unfold(last)
        assert phi["weight"].shape == (10, 3, 12)
        assert_close(phi["weight"].sum(1), last["parameters"]["head.weight"])
        assert bool(last["parameters"]["head.bias"].any()) == bias == ("bias" in phi)


def test_a_net_whose_head_is_not_linear_is_rejected_with_one_sentence() -> None:
    site = small(FedCD()).server_site(0, "init")
    net = Net(nn.Identity(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 10)), 3)
    with pytest.raises(UsageError, match="linear"):
        FedCD().init_server(replace(site, net=net))


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


def middle() -> tuple[Site, Payload, Net, Tensor, Tensor, Tensor]:
    """A client in the second of three rounds, moved away from what it received; one batch with fine labels."""
    site = small(FedCD()).site(1, 1, "train")
    site.load(server())
    fine, own = assign_fine_classes(site.infer(site.net.body), site.data.labels, server()[GROUP], 3, site.rng)
    head = FineHead(unfold(server()), own["mean"])
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


def by_hand(method: FedCD, scene: Any, mu: float, rho: float) -> Tensor:
    """Eq. 11 with loops over samples and prototypes."""
    _, broadcast, net, x, fine, known = scene
    M, g, phi_g = method.M, broadcast[GROUP], unfold(broadcast)["weight"]
    z = net.body(x)
    samples = [(z[i], int(fine[i]), 1.0) for i in range(len(x))]
    n = float(g["count"].sum())
    appended = [(g["mean"][j], j, rho * len(x) * float(g["count"][j]) / n) for j in range(len(known))]
    everything = samples + [p for p in appended if p[2] > 0]
    N = sum(importance for _, _, importance in everything)
    total = torch.zeros(())
    for feature, j, importance in everything:
        c = tensor([j // M])
        u = (feature @ net.head.weight.flatten(0, 1).T).view(1, -1, M).sum(2)
        u_g = (feature @ phi_g.flatten(0, 1).T).view(1, -1, M).sum(2).detach()
        s = (cosine_similarity(feature[None], net.head.prototypes) / method.tau).exp()
        same_class = torch.arange(len(s)) // M == j // M
        own = torch.arange(len(s)) == j
        weights = torch.where(same_class, method.alpha, 1 - method.alpha).masked_fill(own, 1.0).masked_fill(~known, 0.0)
        hpc = -(s[j] / (weights * s).sum()).log()
        tckd, nckd = decoupled(u, u_g, c)
        gid = tckd[0] + method.xi * nckd[0]
        total = total + importance / N * (mu * cross_entropy(u, c) + (1 - mu) * hpc + method.lam * gid)
    y = fine // M
    means = [(z[y == c].mean(0) @ phi_g.flatten(0, 1).T).view(1, -1, M).sum(2) for c in y.unique()]
    return total + method.gamma * cross_entropy(torch.cat(means), y.unique())


@pytest.mark.parametrize("rho", [0.0, 1.0, 2.5, "paper"])
def test_the_loss_is_eq_11_in_value_and_gradient(rho: Any) -> None:
    method = FedCD(mu="linear", rho=rho, gamma=0.6, lam=0.7, tau=0.5, xi=2.0)
    scene = middle()
    mass = float(scene[1][GROUP]["count"].sum()) / len(scene[0].data) if rho == "paper" else rho
    assert mass != 0 or rho == 0
    value, found = step(method, scene)
    wanted = by_hand(method, scene, mu=2 / 3, rho=mass)
    assert value == pytest.approx(wanted.item(), rel=1e-5)
    for name, gradient in gradients(scene[2], wanted).items():
        assert_close(found[name], gradient, rtol=1e-3, atol=1e-6)


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

    `paper`: 4 samples behind the prototype, 2 at the client, so I = 4 / 2 for each sample of a batch of 2.
    """
    u = -torch.log(torch.expm1(tensor([0.2, 0.6, 1.0])))  # log(1 + e^-u) = ce
    z = torch.stack([u, torch.zeros(3)], 1)
    site = Site(None, Data(z[:2], FIRST.repeat(2), some(0, held, 2)), Training(), 2, 1, {}, seeded(0), rounds=2)
    g = Tensors(mean=z[2:].repeat(2, 1), count=tensor([4.0, 0.0]), known=tensor([True, False]))
    broadcast = {"parameters": Tensors({"head.weight": torch.eye(2), "head.bias": torch.zeros(2)}), GROUP: g}
    head = FineHead(Tensors(weight=torch.eye(2)[:, None]), g["mean"].clone())
    net = Net(nn.Identity(), head, 2)
    method = FedCD(M=1, gamma=0, lam=0, mu=1.0, rho=rho)
    both = method.loss(site, broadcast, head, g["known"])(net, z[:2], FIRST.repeat(2))
    assert both.item() == pytest.approx(0.8)
    alone = replace(method, rho=0).loss(site, broadcast, head, g["known"])(net, z[:2], FIRST.repeat(2))
    assert alone.item() == pytest.approx(0.4)


def test_fine_classes_may_be_assigned_in_every_batch() -> None:
    """The received labels' classes count, not their fine classes; Eq. 2 with the prototypes of the round's start."""
    method = FedCD(mu="linear", rho=1.0, assign="batch", gamma=0.6, tau=0.5)
    scene = middle()
    site, broadcast, net, x, fine, known = scene
    moved = most_similar(net.body(x).detach(), fine // 3, net.head.prototypes.detach(), known, 3)
    shuffled = fine // 3 * 3 + (fine + 1) % 3
    assert step(method, (site, broadcast, net, x, shuffled, known))[0] == pytest.approx(
        by_hand(method, (site, broadcast, net, x, moved, known), mu=2 / 3, rho=1.0).item(), rel=1e-5
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
    wanted = by_hand(method, (*scene[:4], assigned, known), mu=2 / 3, rho=1.0).item()
    assert loss(net, x, fine).item() == pytest.approx(wanted, rel=1e-5)


def test_a_batch_assigns_no_sample_to_an_unknown_prototype() -> None:
    """z = (-1, 0) has cosine -1 with the known prototype (1, 0) and 0 with the unknown one, which is zeros.

    Assigned to the known one, which is alone in the sum of Eq. 3, omega = 1 and the loss is 0.
    """
    z, known = tensor([[-1.0, 0.0]]), tensor([True, False])
    g = Tensors(mean=tensor([[1.0, 0.0], [0.0, 0.0]]), count=torch.zeros(2), known=known)
    site = Site(None, Data(z, tensor([0]), tensor([0])), Training(), 1, 1, {}, seeded(0), rounds=2)
    broadcast = {"parameters": Tensors({"head.weight": torch.ones(1, 2), "head.bias": torch.zeros(1)}), GROUP: g}
    head = FineHead(Tensors(weight=torch.ones(1, 2, 2)), g["mean"].clone())
    method = FedCD(M=2, gamma=0, lam=0, mu=0.0, rho=0, assign="batch")
    loss = method.loss(site, broadcast, head, known)(Net(nn.Identity(), head, 2), z, tensor([0]))
    assert loss.item() == pytest.approx(0.0, abs=1e-6)


# Who trains what


def body(found: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten() for name, g in found.items() if name.startswith("body.")])


@pytest.mark.parametrize(
    ("method", "moved"),
    [
        (FedCD(mu=1.0, gamma=0, lam=0), {"body", "head.weight"}),
        (FedCD(mu=0.0, gamma=0, lam=0), {"body", "head.prototypes"}),
        (FedCD(mu=0.0, gamma=1, lam=0, hpc=False), {"body"}),
        (FedCD(mu=0.0, gamma=0, lam=1, hpc=False), {"body", "head.weight"}),
        (FedCD(mu=0.0, gamma=0, lam=1, hpc=False, distil="kd"), {"body", "head.weight"}),
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
    for name in ("head.weight", "head.prototypes"):
        assert not torch.allclose(with_them[name] * 4, without[name], rtol=1e-2, atol=1e-4)


def test_prototypes_do_not_decay() -> None:
    """What the optimiser will add to the gradient is taken off it; the loss's value stays."""
    scene = middle()
    decaying = replace(scene[0], training=replace(scene[0].training, weight_decay=0.3))
    value, found = step(FedCD(), scene)
    other, decayed = step(FedCD(), (decaying, *scene[1:]))
    assert value == other
    P = scene[2].head.prototypes.detach()
    assert_close(decayed.pop("head.prototypes"), found.pop("head.prototypes") - 0.3 * P)
    assert all(torch.equal(decayed[name], found[name]) for name in found)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_prototypes_without_a_gradient_are_sent_unchanged_despite_weight_decay(fast: bool, momentum: float) -> None:
    """tau = 1e9 leaves nothing of L_hpc's gradient."""
    method = FedCD(tau=1e9, mu=0.5)
    training = Training(lr=0.1, batch_size=16, weight_decay=0.1, momentum=momentum)
    update = small(method, training=training, fast=fast).train_client(0, 1, "train", server(), {}).update
    assert_close(update.payload[GROUP]["mean"], server()[GROUP]["mean"], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(update.payload[FINE]["weight"], server()[FINE]["weight"], rtol=1e-2)


# The client's round


def start(world: World) -> Payload:
    return world.method.broadcast(world.method.init_server(world.server_site(0, "init")))


@pytest.mark.parametrize("refresh", [False, True])
def test_the_first_round_sends_k_means_centres_of_the_received_or_the_trained_features(refresh: bool) -> None:
    """mu = 1: L_hpc is off, P^k stays; with a refresh Lloyd's steps continue with the trained features."""
    world = small(FedCD(mu="linear", kmeans_refresh=refresh))
    broadcast = start(world)
    update = world.train_client(2, 0, "train", broadcast, {}).update
    site = world.site(2, 0, "train")
    site.load(broadcast)
    fine, own = assign_fine_classes(site.infer(site.net.body), site.data.labels, broadcast[GROUP], 3, site.rng)
    count = torch.bincount(fine, minlength=30).float()
    if refresh:
        z = site.infer(site.frozen(model_of(update.payload)).body)
        own = class_means(z, lloyd(z, site.data.labels, fine, 10, 3), 30)
        count = own["count"]
    assert_close(update.payload[GROUP]["mean"], own["mean"])
    assert torch.equal(update.payload[GROUP]["count"], count)


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
    method, lr = FedCD(mu="linear", rho=1.0, assign=assign, tau=0.2), 0.5
    update, site, fine = second_round(method, Training(lr=lr, batch_size=1000))
    head = FineHead(unfold(server()), server()[GROUP]["mean"].clone())
    net, x = Net(site.net.body, head, 12), site.data.take(torch.arange(len(fine)))[0]
    loss = by_hand(method, (site, server(), net, x, fine, server()[GROUP]["known"]), mu=2 / 3, rho=1.0)
    pull = gradients(net, loss)
    assert pull["head.prototypes"].norm() > 0.01
    assert_close(update[GROUP]["mean"], head.prototypes.detach() - lr * pull["head.prototypes"], rtol=1e-4, atol=1e-5)
    assert_close(unfold(update)["weight"], head.weight.detach() - lr * pull["head.weight"], rtol=1e-4, atol=1e-5)
    for name, p in net.body.named_parameters():
        moved = p.detach() - lr * pull[f"body.{name}"]
        assert_close(update["parameters"][f"body.{name}"], moved, rtol=1e-4, atol=1e-5)


def test_later_rounds_send_prototypes_that_learnt_and_counts_of_the_round_s_start() -> None:
    update, _, fine = second_round(FedCD())
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
    """A client's update with class-vectors [C, M, d] and a body of one number."""
    folded = fold(Tensors(weight=phi))
    parameters = Tensors({"body.w": tensor([w])}) | folded["parameters"]
    return Update({"parameters": parameters, FINE: folded[FINE], GROUP: Tensors(mean=P, count=count)}, weight)


def server_of(phi: Tensor, P: Tensor, known: Tensor) -> Payload:
    first = update_of(phi, P, torch.zeros(len(P))).payload
    return first | {GROUP: first[GROUP] | {"known": known}}


SITE: Any = None  # aggregation does not look at it


def test_prototypes_are_pooled_by_the_counts_of_their_fine_class() -> None:
    """(10 (1, 2) + 30 (3, 6)) / 40 = (2.5, 5); without any the last value stays, with importance 0; else unknown."""
    phi = torch.zeros(3, 1, 2)
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
    phis = [Tensors(weight=tensor([[v]])) for v in ([1.0, 0.0], [0.0, 1.0], [2.0, 2.0])]
    vector = combine_classifiers(phis, nu[:, None, None])["weight"].flatten().tolist()
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
    phi, P = Tensors(weight=normal(0, 3, 2, 4), bias=normal(1, 3, 2)), normal(2, 6, 4)
    for used in (phi, Tensors(weight=phi["weight"])):
        for j in range(6):
            logits = [
                float(P[j] @ phi["weight"][c, m]) + (float(phi["bias"][c, m]) if "bias" in used else 0)
                for c in range(3)
                for m in range(2)
            ]
            q = math.exp(logits[j]) / sum(map(math.exp, logits))
            assert float(log_quality(used, P)[j].exp()) == pytest.approx(q, rel=1e-5)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("rule", ["acla", "norm", "cla", "mean"])
def test_each_class_vector_is_averaged_by_its_own_weights(rule: Any, counts: bool, known: bool) -> None:
    """Three clients, two classes of two; of the last fine class no client has a sample, in this round or ever."""
    phis = [normal(i, 2, 2, 3) for i in range(3)]
    P = [normal(10 + i, 4, 3) for i in range(3)]
    held = [tensor([4.0, 1, 0, 0]), tensor([0.0, 1, 5, 0]), tensor([6.0, 0, 5, 0])]
    sizes = [5.0, 6.0, 11.0]
    old = server_of(torch.zeros(2, 2, 3), normal(20, 4, 3), tensor([False, False, False, known]))
    updates = [update_of(phis[k], P[k], held[k], sizes[k], w=float(k)) for k in range(3)]
    fresh = FedCD(M=2, classifier=rule, acla_temp=0.5, counts=counts).aggregate(SITE, old, iter(updates))
    by_samples = tensor(sizes) / 22
    new = fresh[GROUP]["mean"]  # Eq. 13 looks at the new P^g
    q = torch.stack([log_quality(Tensors(weight=phi), new).exp() for phi in phis])
    nu = {
        "acla": (q / 0.5).softmax(0),
        "norm": q / q.sum(0),
        "cla": torch.stack(held),
        "mean": by_samples[:, None].expand(3, 4),
    }[rule].clone()
    judged = rule in ("acla", "norm")
    if counts and judged:
        nu *= torch.stack(held)
    nu /= nu.sum(0)
    if counts or not judged or not known:
        nu[:, 3] = by_samples
    assert_close(nu.sum(0), torch.ones(4))
    wanted = sum(nu[k].view(2, 2, 1) * phis[k] for k in range(3))
    assert_close(unfold(fresh)["weight"], wanted)
    assert_close(fresh["parameters"]["head.weight"], wanted.sum(1))
    assert float(fresh["parameters"]["body.w"]) == pytest.approx((6 + 22) / 22)


def test_one_client_s_classifier_becomes_the_server_s() -> None:
    phi, P = normal(0, 2, 3, 4), normal(1, 6, 4)
    old = server_of(torch.zeros(2, 3, 4), torch.zeros(6, 4), torch.zeros(6, dtype=torch.bool))
    for rule in ("acla", "norm", "cla", "mean"):
        fresh = FedCD(classifier=rule).aggregate(SITE, old, iter([update_of(phi, P, torch.ones(6))]))
        assert_close(unfold(fresh)["weight"], phi)


def test_a_bias_takes_the_weights_of_its_class_vector() -> None:
    phis = [Tensors(weight=normal(k, 2, 2, 3), bias=normal(5 + k, 2, 2)) for k in range(2)]
    nu = tensor([[[0.1, 0.2], [0.3, 0.4]], [[0.9, 0.8], [0.7, 0.6]]])
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


def test_a_model_is_evaluated_with_its_plain_head() -> None:
    world = small(FedCD())
    records, simulation = rounds(world, 2)
    last = records[-1].server
    site = world.site(-1, 2, "evaluate")
    site.load(last)
    data = Data(world.x_test, world.y_test, torch.arange(len(world.y_test)), world.mean, world.std)
    z = site.infer(site.net.body, data)
    predicted = (z @ unfold(last)["weight"].flatten(0, 1).T).view(len(z), 10, 3).sum(2).argmax(1)
    accuracy = float((predicted == world.y_test).float().mean())
    assert simulation.evaluate(1, world.method.broadcast(last)).global_.accuracy == pytest.approx(accuracy)


def test_traffic_is_model_class_vectors_and_prototypes() -> None:
    """CIFAR-10: extractor 90056, class-vectors 30 * 256 (10 zeros of a bias come along), prototypes 30 * 256 + 30."""
    net = build("simple-cnn", (3, 32, 32), 10, seed=0)
    data = Data(torch.zeros(4, 32, 32, 3, dtype=torch.uint8), torch.arange(4), torch.arange(4), (0.5,) * 3, (0.25,) * 3)
    site = Site(net, data, Training(), 10, 1, {}, seeded(0))
    site.initial = site.model()
    down = FedCD().broadcast(FedCD().init_server(site))
    up = FedCD().client(site, down, {})[0].payload
    for payload, known in ((down, 30), (up, 0)):
        size = size_of(payload)
        assert size["parameters"] + size[FINE] == 4 * (90056 + 7680 + 10)
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
    "cla": {"classifier": "cla"},
    "acla_temp": {"acla_temp": 0.1},
    "counts": {"counts": False},
    "assign": {"assign": "batch"},
    "kmeans_refresh": {"kmeans_refresh": False},
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
        ("robust", {"mu": 0.9, "rho": 0.1, "counts": True, "kmeans_refresh": True}),
        ("paper", {"mu": "linear", "rho": "paper", "counts": False, "kmeans_refresh": False}),
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
