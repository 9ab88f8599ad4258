"""FedMR: Eqs. 3 to 5, Lemma 1, the prototypes' way through a round."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, tensor
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from fedskew.core.method import Method, Update, mean_of, model_of
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Training
from fedskew.data.split.chain import make_partition
from fedskew.experiment.config import Experiment
from fedskew.experiment.diagnostics import eigenvalue_spread, eigenvalues, feature_collapse, head_distances
from fedskew.federation.wire import decode
from fedskew.methods._shared.prototypes import GROUP, class_means
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.fedmr import BASES, MU1, MU2, FedMR, balanced, inter_class, intra_class, mean_distance
from fedskew.studies.execution import execute
from helpers.nets import linear_features
from toys import digits, rounds, same, toy_q, w_of

X = tensor([[1.0, 2, 0], [3, 2.5, 1], [2, 4, 5], [4, 3.5, 2]])
SECOND = tensor([[0.0, 1, 1], [1, 0, 3], [2, 2, 2]])
Z, Y = torch.cat([X, SECOND, tensor([[9.0, 9, 9]])]), tensor([0, 0, 0, 0, 1, 1, 1, 2])  # class 2 is one sample
ONE = torch.zeros(4, dtype=torch.int64)
PCDD = "pcdd:clients=5,classes=2"

G = tensor([[0.0, 0], [4, 0], [0, 3]])
SAMPLES, LABELS = tensor([[1.0, 0], [3, 0], [4, 1], [1, 1]]), tensor([0, 0, 1, 1])  # class 2 is missing
ALL = tensor([True, True, True])
HELD = tensor([True, True, False])

FORMS = ["paper", "code", "norm"]
SCOPES = ["all", "present", "missing"]
seeds = st.integers(0, 2**31)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch(seed: int, samples: int = 24, d: int = 5, classes: int = 4) -> tuple[Tensor, Tensor]:
    y = torch.randint(classes, (samples,), generator=torch.Generator().manual_seed(seed))
    return normal(seed, samples, d), y


def value(loss: Tensor) -> float:
    return loss.item()


# Eq. 3: the intra-class loss


def test_intra_class_is_the_squared_norm_of_the_correlation_matrix() -> None:
    """r12 = .424264, r13 = .119523, r23 = .929670: 3 + 2 (.18 + .0142857 + .8642857) = 5.117143.

    Deviation by 1/n, covariance by 1/(n-1), as printed: diagonal 4/3, 16/9 times 5.117143 = 9.097143.
    """
    assert_close(torch.corrcoef(X.T)[[0, 0, 1], [1, 2, 2]], tensor([0.424264, 0.119523, 0.929670]), rtol=0, atol=1e-6)
    assert value(intra_class(X, ONE, "paper")) == pytest.approx(5.117143, abs=1e-5)


def test_lemma_1_on_numbers() -> None:
    """Eigenvalues (.018947, .910248, 2.070805): sum (lambda - 1)^2 = 2.117143 = 5.117143 - 3."""
    found = eigenvalues(X)
    assert_close(found, tensor([2.070805, 0.910248, 0.018947]).double(), rtol=0, atol=1e-6)
    assert value((found - found.mean()).square().sum()) == pytest.approx(2.117143, abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(seeds, st.integers(2, 12), st.integers(2, 12))
def test_lemma_1_holds_for_any_features_more_samples_than_features_or_fewer(seed: int, n: int, d: int) -> None:
    """sum_i (lambda_i - mean lambda)^2 = |M|_F^2 - d, for every class of two samples or more."""
    z = normal(seed, n, d)
    assume(z.var(0).min() > 1e-2)  # the 1e-8 added to variances aside
    spread = (eigenvalues(z) - eigenvalues(z).mean()).square().sum()
    assert_close(spread + d, intra_class(z, torch.zeros(n, dtype=torch.int64), "paper"), rtol=1e-5, atol=1e-5)


def test_the_form_of_the_authors_code() -> None:
    """One class: (3^2 / 4) r with r = 2.117143 / 6 = .352857: .793929.

    With class 1 (r = (4.5 - 3) / 6 = .25) and a lone sample: (9 * .352857 + 4 * .25) / (4 + 3) = .596531.
    """
    assert value(intra_class(X, ONE, "code")) == pytest.approx(0.793929, abs=1e-6)
    assert value(intra_class(Z, Y, "code")) == pytest.approx(0.596531, abs=1e-6)


def test_the_paper_s_form_and_the_free_one_are_means_over_classes_that_have_two_samples() -> None:
    """paper: (5.117143 + 4.5) / 2 = 4.808571; norm: (.352857 + .25) / 2 = .301429."""
    assert value(intra_class(Z, Y, "paper")) == pytest.approx(4.808571, abs=1e-5)
    assert value(intra_class(Z, Y, "norm")) == pytest.approx(0.301429, abs=1e-6)


def test_fewer_samples_than_features_leave_a_floor() -> None:
    """trace R = d over n - 1 eigenvalues: |R|^2 >= d^2 / (n - 1); class 1 meets it: 9 / 2. d 512, n 64: 4161.015873."""
    assert value(intra_class(SECOND, ONE[:3], "paper")) == pytest.approx(4.5, abs=1e-5)
    assert value(intra_class(normal(0, 64, 512), torch.zeros(64), "paper")) > 512**2 / 63
    h = torch.ones(1, 1)
    for _ in range(6):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    columns = h[:, 1:]  # 63 centred, orthogonal columns of 64 samples
    assert value(intra_class(columns, torch.zeros(64), "paper")) == pytest.approx(63, rel=1e-5)
    assert value(intra_class(columns.repeat(1, 8), torch.zeros(64), "paper")) == pytest.approx(504**2 / 63, rel=1e-5)


def test_the_same_feature_twice_is_a_correlation_of_one() -> None:
    """r12 = 1, and -1 after a change of sign: r = 1 either way."""
    first = normal(0, 6, 1)
    for sign in (1, -1):
        z = torch.cat([first, 3 * sign * first + 2], 1)
        assert value(intra_class(z, torch.zeros(6), "norm")) == pytest.approx(1.0, abs=1e-6)


def loops(z: Tensor, y: Tensor, form: str) -> Tensor:
    """Eq. 3 class by class, features by features: as one would write it first."""
    groups = [z[y == c] for c in y.unique() if (y == c).sum() > 1]
    grams = [(w.T @ w) for g in groups for w in [(g - g.mean(0)) / (g.var(0) + 1e-8).sqrt()]]
    off = [(m - m.diag().diag()).square().sum() / (m.shape[0] * (m.shape[0] - 1)) for m in grams]
    sizes = [len(g) for g in groups]
    if form == "code":
        return torch.stack(off).sum() / sum(sizes)
    part = [m.square().sum() for m in grams] if form == "paper" else off
    return torch.stack([v / (n - 1) ** 2 for v, n in zip(part, sizes, strict=True)]).mean()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("d", [2, 5, 40])
def test_all_classes_at_once_equal_class_by_class_in_value_and_gradient(form: Any, d: int) -> None:
    z, y = batch(1, d=d)
    z = z.relu()
    z[:, 0] = 0  # a dead unit
    z.requires_grad_()
    once, mean_distance = intra_class(z, y, form), loops(z, y, form)
    assert_close(once, mean_distance)
    assert_close(*(torch.autograd.grad(v, z)[0] for v in (once, mean_distance)))


@settings(max_examples=30, deadline=None)
@given(seeds, st.sampled_from(FORMS))
def test_intra_class_ignores_each_class_s_shift_and_each_feature_s_scale(seed: int, form: Any) -> None:
    z, y = normal(seed, 24, 5), torch.arange(24) % 4
    shift, scale = 10 * normal(seed + 1, 4, 5), normal(seed + 2, 5).exp()
    moved = z * scale + shift[y]
    assume(min(v[y == c].var(0).min() for v in (z, moved) for c in range(4)) > 1e-3)
    assert_close(intra_class(moved, y, form), intra_class(z, y, form), rtol=1e-4, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(seeds, st.sampled_from(FORMS))
def test_intra_class_ignores_the_order_of_samples_and_of_features(seed: int, form: Any) -> None:
    z, y = batch(seed)
    rng = torch.Generator().manual_seed(seed)
    rows, columns = torch.randperm(24, generator=rng), torch.randperm(5, generator=rng)
    assert_close(intra_class(z[rows][:, columns], y[rows], form), intra_class(z, y, form))


@pytest.mark.parametrize("form", FORMS)
def test_descending_the_intra_class_loss_decorrelates(form: Any) -> None:
    z = normal(0, 40, 1) + 0.1 * normal(1, 40, 3)
    z.requires_grad_()
    y = torch.zeros(40, dtype=torch.int64)
    optimiser = torch.optim.Adam([z], lr=0.1)
    assert torch.corrcoef(z.T)[0, 1] > 0.9
    for _ in range(60):
        optimiser.zero_grad()
        intra_class(z, y, form).backward()
        optimiser.step()
    assert torch.corrcoef(z.T)[0, 1].abs() < 0.1


# No features break it


AWKWARD: dict[str, tuple[Tensor, Tensor]] = {
    "every class once": (torch.rand(4, 6), torch.arange(4)),
    "one sample": (torch.rand(1, 6), tensor([2])),
    "all units dead": (torch.zeros(8, 6), torch.arange(8) % 3),
    "one sample lights a unit": (torch.eye(8)[:, :6], torch.arange(8) % 2),
    "nearly dead": (torch.rand(8, 6) * 1e-6, torch.arange(8) % 2),
    "equal samples": (torch.ones(8, 6) * torch.arange(6), torch.arange(8) % 2),
    "large": (torch.rand(8, 6) * 1e4, torch.arange(8) % 2),
    "two samples, many features": (torch.rand(2, 500), torch.zeros(2, dtype=torch.int64)),
    "one feature": (torch.rand(8, 1), torch.arange(8) % 2),
}


@pytest.mark.parametrize("case", AWKWARD)
def test_no_features_give_a_value_or_a_gradient_that_is_not_finite(case: str) -> None:
    z, y = AWKWARD[case]
    z = z.clone().requires_grad_()
    prototypes = z.detach()[torch.arange(4) % len(z)]  # samples that sit on prototypes
    known = torch.ones(4, dtype=torch.bool)
    losses = [intra_class(z, y, form) for form in ("paper", "code", "norm")]
    losses += [inter_class(z, y, prototypes, known, others) for others in (known, ~known)]
    for loss in losses:
        assert loss.isfinite()
        assert torch.autograd.grad(loss, z)[0].isfinite().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", ["every class once", "one sample", "all units dead", "equal samples"])
def test_without_anything_to_decorrelate_the_loss_and_its_gradient_are_zero(case: str, form: Any) -> None:
    z, y = AWKWARD[case]
    z = z.clone().requires_grad_()
    loss = intra_class(z, y, form)
    assert value(loss) == 0
    assert not torch.autograd.grad(loss, z)[0].any()


def test_a_dead_unit_correlates_with_nothing() -> None:
    """|R|^2 of two features is 2 + 2 r^2; a third, dead one adds neither diagonal nor correlation."""
    dead = torch.cat([X[:, :2], torch.zeros(4, 1)], 1)
    assert_close(intra_class(dead, ONE, "paper"), intra_class(X[:, :2], ONE, "paper"))
    assert value(intra_class(dead, ONE, "paper")) == pytest.approx(2 + 2 * 0.424264**2, abs=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_single_precision_is_enough(form: Any) -> None:
    z, y = batch(3, samples=128, d=256, classes=2)
    z = z.relu()
    assert_close(intra_class(z.float(), y, form).double(), intra_class(z, y, form), rtol=1e-4, atol=1e-6)


# Eq. 4: the inter-class loss


@pytest.mark.parametrize(
    ("others", "expected"),
    [(ALL, 0.584284), (HELD, 0.937016), (~HELD, 0.231552)],
    ids=["all", "present", "missing"],
)
def test_inter_class_is_the_mean_hinge_over_pairs_of_classes(others: Tensor, expected: float) -> None:
    """D01 = (0 + 2) / 2 = 1, D10 = (0 + sqrt 10 - sqrt 2) / 2 = .874032, D02 = 0, D12 = (0 + sqrt 10 - sqrt 5) / 2
    = .463105; all: their sum / 4; the client's own classes: (D01 + D10) / 2; missing ones: (D02 + D12) / 2.
    """
    assert value(inter_class(SAMPLES, LABELS, G, ALL, others)) == pytest.approx(expected, abs=1e-6)


def test_a_class_counts_once_however_many_samples_it_has() -> None:
    more = torch.cat([SAMPLES, SAMPLES[:2], SAMPLES[:2]]), torch.cat([LABELS, LABELS[:2], LABELS[:2]])
    assert_close(inter_class(*more, G, ALL, ALL), inter_class(SAMPLES, LABELS, G, ALL, ALL))


def test_a_sample_on_its_own_prototype_costs_nothing() -> None:
    z = G.clone().requires_grad_()
    loss = inter_class(z, torch.arange(3), G, ALL, ALL)
    assert value(loss) == 0
    assert not torch.autograd.grad(loss, z)[0].any()


def test_unknown_prototypes_take_no_part() -> None:
    """Class 0 unknown: of class 1, D12 alone. Nothing known: 0, with gradient 0."""
    later = tensor([False, True, True])
    assert value(inter_class(SAMPLES, LABELS, G, later, later)) == pytest.approx(0.463105, abs=1e-6)
    z = SAMPLES.clone().requires_grad_()
    loss = inter_class(z, LABELS, G, ~ALL, ~ALL)
    assert value(loss) == 0
    assert not torch.autograd.grad(loss, z)[0].any()


def test_the_margin_pulls_to_the_own_prototype_and_away_from_the_nearer_one() -> None:
    """z = (3, 0) of class 0 beside g_1 = (4, 0): gradient of |z - g_0| - |z - g_1| is (1, 0) - (-1, 0) = (2, 0)."""
    z = tensor([[3.0, 0.0]], requires_grad=True)
    inter_class(z, tensor([0]), G, ALL, tensor([True, True, False])).backward()
    assert_close(z.grad, tensor([[2.0, 0.0]]))


@settings(max_examples=30, deadline=None)
@given(seeds)
def test_inter_class_at_once_equals_pair_by_pair(seed: int) -> None:
    z, y = batch(seed)
    g, rng = normal(seed + 1, 4, 5), torch.Generator().manual_seed(seed)
    known = torch.rand(4, generator=rng) < 0.7
    others = known & (torch.rand(4, generator=rng) < 0.7)
    pairs = [
        ((z[y == i] - g[i]).norm(dim=1) - (z[y == i] - g[j]).norm(dim=1)).relu().mean()
        for i in y.unique()
        for j in range(4)
        if known[i] and others[j] and i != j
    ]
    assert_close(inter_class(z, y, g, known, others), torch.stack(pairs).mean() if pairs else z.sum() * 0)


def test_gradients_are_those_of_finite_differences() -> None:
    z, y = batch(5, samples=7, d=3, classes=3)
    g, known = normal(6, 3, 3), torch.ones(3, dtype=torch.bool)
    for form in ("paper", "code", "norm"):
        assert torch.autograd.gradcheck(lambda t, form=form: intra_class(t, y, form), z.requires_grad_())
    assert torch.autograd.gradcheck(lambda t: inter_class(t, y, g, known, known), z.requires_grad_())


# The motivation: sec. 3.2


def test_averaging_heads_of_disjoint_classes_turns_a_direction_by_45_degrees() -> None:
    """Rows 2 of the heads: (-1/2, sqrt3/2), 0, (0, 1); their mean (-1/6, (sqrt3+2)/6) against (-sqrt3/2, 1/2)."""
    s = math.sqrt(3) / 2
    heads = [[[0.5, -s], [-0.5, s], [0, 0]], [[0.5, s], [0, 0], [-0.5, -s]], [[0, 0], [0, 1.0], [0, -1.0]]]
    updates = [Update({"parameters": Tensors({"head.weight": tensor(h, dtype=torch.float64)})}, 1.0) for h in heads]
    averaged = mean_of(updates)["parameters"]["head.weight"][1]
    best = tensor([-s, 0.5], dtype=torch.float64)
    angle = torch.acos(averaged @ best / averaged.norm() / best.norm()).rad2deg()
    assert value(angle) == pytest.approx(45.0, abs=1e-9)


def test_p5c2_is_exactly_disjoint_and_uses_every_index_once() -> None:
    y = np.repeat(np.arange(10), 7)
    parts = make_partition(PCDD, y, seed=0, classes=10).clients
    assert sorted(np.concatenate(parts)) == list(range(70))
    assert [len(np.unique(y[p])) for p in parts] == [2] * 5
    assert all(not set(y[a]) & set(y[b]) for a, b in combinations(parts, 2))


# The method


def test_without_its_terms_it_is_fedavg() -> None:
    """Toy Q, two steps of 0.1: w = 1/4 * .19 - 3/4 * .51 = -.335."""
    off = FedMR(mu1=0, mu2=0)
    records, _ = rounds(toy_q(off), 3)
    assert w_of(records[0]) == pytest.approx(-0.335)
    plain, _ = rounds(toy_q(FedAvg()), 3)
    assert all(same(a.server, b.server) for a, b in zip(records, plain, strict=True))


@pytest.mark.parametrize("lite", [0, 4])
def test_without_its_terms_it_is_fedavg_bit_for_bit_on_digits_and_sends_no_prototypes(lite: int) -> None:
    ours, _ = rounds(digits(FedMR(mu1=0, mu2=0, lite=lite), split=PCDD), 2)
    plain, _ = rounds(digits(FedAvg(), split=PCDD), 2)
    assert same(ours[-1].server, plain[-1].server)
    assert ours[-1].bytes_up == plain[-1].bytes_up


def test_the_margin_is_off_in_the_first_round_and_on_in_the_second() -> None:
    twice = Training(lr=0.1, batch_size=16, epochs=2)  # so that a draw too many would show in the second pass
    few = FedMR(mu1=0, mu2=1, lite=4)
    pairs = [
        (few, FedAvg()),
        (replace(few, lite_scope="both"), FedAvg()),
        (replace(few, mu1=0.1), FedMR(mu1=0.1, mu2=0)),
    ]
    for method, without in pairs:
        ours, _ = rounds(digits(method, split=PCDD, training=twice), 2)
        plain, _ = rounds(digits(without, split=PCDD, training=twice), 2)
        assert same(model_of(ours[0].server), model_of(plain[0].server))
        assert not same(model_of(ours[1].server), model_of(plain[1].server))


def in_the_second_round(method: FedMR) -> tuple[Any, Payload, Tensor, Tensor, Tensor, Tensors]:
    """(site, broadcast, samples, labels, features, prototypes) of a client after one round of all clients."""
    records, simulation = rounds(digits(method, split=PCDD), 1)
    site = simulation.world.site(1, 1, "train")
    broadcast = method.broadcast(records[0].server)
    site.load(broadcast)
    x, y = site.data.take(torch.arange(16))
    return site, broadcast, x, y, site.net.body(x), broadcast[GROUP]


def test_the_objective_is_eq_5() -> None:
    method = FedMR(mu1=0.3, mu2=0.7, intra_form="norm", limit=0, inter_form="paper")
    site, broadcast, x, y, z, g = in_the_second_round(method)
    known = g["count"] > 0
    assert known.all()
    for scope, others in (("all", known), ("present", bins(site.data.labels)), ("missing", ~bins(site.data.labels))):
        objective = replace(method, inter_scope=scope).reshaped(site, broadcast)
        wanted = (
            cross_entropy(site.net.head(z), y)
            + 0.3 * intra_class(z, y, "norm")
            + 0.7 * inter_class(z, y, g["mean"], known, others)
        )
        assert_close(objective(site.net, x, y), wanted)


def test_the_margin_free_of_scale_is_eq_4_over_the_mean_distance_of_known_prototypes() -> None:
    """(0,0), (4,0), (0,3): distances 4, 3, 5, mean 4. Features and prototypes twice as large: the same value."""
    assert_close(mean_distance(G), tensor(4.0))
    assert mean_distance(G[:1]) == mean_distance(G[:0]) == 1
    raw = FedMR(mu1=0, mu2=0.7, inter_form="paper")
    records, simulation = rounds(digits(raw, split=PCDD), 1)
    site, broadcast = simulation.world.site(1, 1, "train"), records[0].server
    site.load(broadcast)
    x, y = site.data.take(torch.arange(16))
    count, loss = broadcast[GROUP]["count"].clone(), cross_entropy(site.net(x), y)
    count[next(c for c in range(10) if c not in y.tolist())] = 0  # one prototype is not known
    some = {GROUP: Tensors(mean=broadcast[GROUP]["mean"], count=count)}
    margins = [m.reshaped(site, some)(site.net, x, y) - loss for m in (raw, replace(raw, inter_form="norm"))]
    assert_close(margins[1], margins[0] / mean_distance(some[GROUP]["mean"][count > 0]))


def test_only_known_classes_are_rivals_whatever_the_scope() -> None:
    """The client holds two classes, h; known are h[0] and one other, o: all {h0, o}, present {h0}, missing {o}."""
    site = digits(FedMR(), split=PCDD).site(1, 1, "train")
    held = bins(site.data.labels)
    first, other = held.nonzero()[0].item(), (~held).nonzero()[0].item()
    count = torch.zeros(10).index_fill(0, tensor([first, other]), 5.0)
    broadcast = {GROUP: Tensors(mean=torch.zeros(10, site.net.features), count=count)}
    for scope, wanted in (("all", {first, other}), ("present", {first}), ("missing", {other})):
        _, known, others = FedMR(inter_scope=scope).rivals(site, broadcast)
        assert torch.equal(known, count > 0)
        assert set(others.nonzero().flatten().tolist()) == wanted


def bins(labels: Tensor) -> Tensor:
    return torch.bincount(labels, minlength=10) > 0


@pytest.mark.parametrize("form", FORMS)
def test_mu1_defaults_to_the_weight_of_the_form(form: Any) -> None:
    """The mlp has 200 features: 1.4 / (200 * 199) for the form of the paper."""
    weight = MU1["norm"] / (200 * 199) if form == "paper" else MU1[form]
    ours, _ = rounds(digits(FedMR(mu2=0, intra_form=form), split=PCDD), 1)
    given_, _ = rounds(digits(FedMR(mu1=weight, mu2=0, intra_form=form), split=PCDD), 1)
    plain, _ = rounds(digits(FedAvg(), split=PCDD), 1)
    assert same(ours[0].server, given_[0].server)
    assert not same(ours[0].server, plain[0].server)


@pytest.mark.parametrize("d", [3, 84, 512])
def test_the_paper_s_form_pulls_as_the_free_one_whatever_the_number_of_features(d: int) -> None:
    """paper = d + d (d - 1) norm, so 1.4 / (d (d - 1)) of its gradient is 1.4 of the other's."""
    z, y = normal(0, 24, d).requires_grad_(), torch.arange(24) % 2
    pulls = []
    for form in ("paper", "norm"):
        mu1, _ = FedMR(intra_form=form).weights(d)  # type: ignore[arg-type]
        pulls.append(torch.autograd.grad(mu1 * intra_class(z, y, form), z)[0])  # type: ignore[arg-type]
    assert_close(*pulls, rtol=1e-6, atol=1e-9)


def test_the_paper_s_preset_is_eqs_3_and_4_as_printed_without_a_limit() -> None:
    method = FedMR(preset="paper")
    chosen = [method.chosen(field) for field in ("intra_form", "inter_form", "inter_scope", "limit")]
    assert chosen == ["paper", "paper", "present", 0]
    assert [FedMR().chosen(field) for field in ("intra_form", "inter_form", "inter_scope", "limit")] == [
        "norm",
        "norm",
        "all",
        1,
    ]
    assert replace(method, intra_form="code", limit=2.0).chosen("limit") == 2
    site, broadcast, x, y, z, g = in_the_second_round(method)
    wanted = (
        cross_entropy(site.net.head(z), y)
        + 1.4 / (200 * 199) * intra_class(z, y, "paper")
        + 0.01 * inter_class(z, y, g["mean"], g["count"] > 0, bins(site.data.labels))
    )
    assert_close(method.reshaped(site, broadcast)(site.net, x, y), wanted)


# The limit: l_intra never overpowers the loss it is added to


def gradients(z: Tensor, y: Tensor, head: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Gradients at z of the cross entropy, and of 100 l_intra with the limit."""
    task = cross_entropy(z @ head, y)
    added = balanced(100 * intra_class(z, y, "norm"), task, z, limit)
    return tuple(torch.autograd.grad(loss, z, retain_graph=True)[0] for loss in (task, added))  # type: ignore[return-value]


def test_a_stronger_pull_is_reduced_to_the_limit_and_keeps_its_direction() -> None:
    z, y = normal(0, 24, 5).requires_grad_(), torch.arange(24) % 4
    free = torch.autograd.grad(intra_class(z, y, "norm"), z)[0]
    for limit in (0.5, 1.0, 2.0):
        task, added = gradients(z, y, normal(1, 5, 4), limit)
        assert_close(added.norm(), limit * task.norm())
        assert_close(added / added.norm(), free / free.norm())


def test_a_weaker_pull_keeps_its_weight() -> None:
    z, y = normal(0, 24, 5).requires_grad_(), torch.arange(24) % 4
    intra = 1e-6 * intra_class(z, y, "norm")
    assert_close(balanced(intra, cross_entropy(z[:, :4], y), z, 1.0), intra)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("repeats", [1, 8])
def test_the_limit_depends_neither_on_the_size_of_features_nor_on_samples_per_class(scale: float, repeats: int) -> None:
    """Features of any size: without a limit the pull grows with 1 / size."""
    z, y = (scale * normal(0, 24 * repeats, 5)).requires_grad_(), torch.arange(24 * repeats) % 4
    task, added = gradients(z, y, normal(1, 5, 4), 1.0)
    assert added.norm() <= task.norm() * (1 + 1e-6)


@pytest.mark.parametrize("case", AWKWARD)
def test_the_limit_is_finite_for_any_features(case: str) -> None:
    z, y = AWKWARD[case]
    z = z.clone().requires_grad_()
    head = torch.zeros(z.shape[1], 4).requires_grad_()  # nothing to compare with: the task's gradient is 0
    total = balanced(intra_class(z, y, "norm"), cross_entropy(z @ head, y), z, 1.0)
    assert total.isfinite()
    assert torch.autograd.grad(total, z)[0].isfinite().all()


def test_a_net_without_a_body_to_train_has_no_limit() -> None:
    """Logistic regression: the features are the inputs, which have no gradient."""
    records, _ = rounds(digits(FedMR(), split=PCDD, hidden=""), 2)
    assert all(t.isfinite().all() for t in records[-1].server["parameters"].values())


# What the default did before: mu1 = 0.1 in the form of the authors' code, whatever the scale of the features

OLD = FedMR(intra_form="code", mu1=0.1, limit=0)


def accuracy(method: Method, net: nn.Module, training: Training) -> float:
    """Of the global model on the test set, mean of the last three of ten rounds; 0 if training diverges."""
    experiment = Experiment(method, split=PCDD, model=net, head="head", rounds=10, training=training)
    outcome = execute(experiment, None)
    if outcome.failed:
        return 0.0
    return sum(r.metrics.global_.accuracy for r in outcome.records[-3:]) / 3  # type: ignore[union-attr]


@pytest.mark.slow
def test_small_linear_features_do_not_collapse() -> None:
    """Where the old default stays at chance (10 %), FedAvg has about 36 % and the default about 45 %."""
    training = Training(lr=0.6, batch_size=64, epochs=2)
    old, new, plain = (accuracy(method, linear_features(3, 128), training) for method in (OLD, FedMR(), FedAvg()))
    assert old < 0.12
    assert plain > 0.2
    assert new > 0.2


@pytest.mark.parametrize("form", ["paper", "norm"])
def test_mu2_defaults_to_the_weight_of_the_form(form: Any) -> None:
    assert FedMR(inter_form=form).weights(84)[1] == MU2[form] > 0
    ours, _ = rounds(digits(FedMR(mu1=0, inter_form=form), split=PCDD), 2)
    given_, _ = rounds(digits(FedMR(mu1=0, mu2=MU2[form], inter_form=form), split=PCDD), 2)
    assert same(ours[1].server, given_[1].server)


def test_prototypes_are_the_class_means_of_trained_clients_pooled_by_samples() -> None:
    """A class split between two clients: the mean of their means by samples, each under its own trained net."""
    world = digits(FedMR(), split="pcdd:clients=10,classes=2", training=None)
    records, _ = rounds(world, 1)
    start = world.method.broadcast(world.method.init_server(world.server_site(0, "init")))
    total, count = torch.zeros_like(start[GROUP]["mean"]), torch.zeros(10)
    for client in range(10):
        update = world.train_client(client, 0, "train", start, {}).update
        site = world.site(client, 0, "train")
        net = site.frozen(model_of(update.payload))
        own = class_means(site.infer(net.body), site.data.labels, 10)
        assert_close(update.payload[GROUP], own)
        total, count = total + own["count"][:, None] * own["mean"], count + own["count"]
    assert_close(records[0].server[GROUP]["count"], count)
    assert_close(records[0].server[GROUP]["mean"], total / count[:, None])


def test_a_class_not_sent_keeps_its_prototype_and_one_never_sent_stays_unknown() -> None:
    """Client 0 trains in the first round, client 1 in the second; the classes of the others stay unknown."""
    records, simulation = rounds(digits(FedMR(), split=PCDD), 2, cohorts=[[0], [1]])
    first, second = (r.server[GROUP] for r in records)
    held = [bins(simulation.world.site(c, 0, "train").data.labels) for c in (0, 1)]
    assert torch.equal(first["count"] > 0, held[0])
    assert torch.equal(second["count"] > 0, held[0] | held[1])
    assert torch.equal(second["mean"][held[0]], first["mean"][held[0]])
    assert torch.equal(second["count"][held[0]], first["count"][held[0]])


def test_part_of_the_clients_sends_prototypes_and_all_use_them() -> None:
    method = FedMR(proto_share=0.4, share_seed=3)
    world = digits(method, split=PCDD)
    start = method.broadcast(method.init_server(world.server_site(0, "init")))
    sent = [world.train_client(c, 0, "train", start, {}).update.payload[GROUP] for c in range(5)]
    senders = [c for c in range(5) if sent[c]["count"].any()]
    assert len(senders) == 2
    assert senders == [c for c in range(5) if method.sends(world.site(c, 7, "train"))]  # in every round the same
    assert all(not t.any() for c in range(5) if c not in senders for t in sent[c].values())
    records, _ = rounds(world, 1)
    assert_close(records[0].server[GROUP]["count"], torch.stack([s["count"] for s in sent]).sum(0))
    for client in range(5):
        site = world.site(client, 1, "train")
        assert method.reshaped(site, records[0].server) is not site.loss
        assert method.rivals(site, records[0].server)[2].sum() == 4


@pytest.mark.parametrize(("share", "senders"), [(0.5, 2), (0.7, 4), (0.01, 1), (1.0, 5)])
def test_the_number_of_senders_is_the_share_of_the_clients_rounded_and_at_least_one(share: float, senders: int) -> None:
    """Of 5 clients: .5 * 5 = 2.5 rounds to the even 2, .7 * 5 = 3.5 to 4; .05 would be none."""
    site = digits(FedMR(), split=PCDD).site(0, 0, "train")
    method = FedMR(proto_share=share)
    assert sum(method.sends(replace(site, client=c)) for c in range(5)) == senders


def test_who_sends_prototypes_depends_on_the_seed() -> None:
    site = digits(FedMR(), split="iid:clients=20").site(0, 0, "train")
    who = [
        {c for c in range(20) if FedMR(proto_share=0.5, share_seed=seed).sends(replace(site, client=c))}
        for seed in range(3)
    ]
    assert {len(w) for w in who} == {10}
    assert who[0] != who[1] != who[2]
    assert all(FedMR().sends(replace(site, client=c)) for c in range(20))


@pytest.mark.parametrize("scope", ["inter", "both"])
def test_lite_takes_a_few_samples_of_each_batch_without_replacement(scope: Any) -> None:
    method = FedMR(mu1=0.3, mu2=0.7, lite=5, lite_scope=scope, intra_form="code", limit=0, inter_form="paper")
    records, simulation = rounds(digits(method, split=PCDD), 1)
    broadcast = method.broadcast(records[0].server)
    site = simulation.world.site(1, 1, "train")
    site.load(broadcast)
    x, y = site.data.take(torch.arange(16))
    z, g = site.net.body(x), broadcast[GROUP]
    known = g["count"] > 0
    objective = method.reshaped(site, broadcast)
    again = site.rng.clone_state()
    for _ in range(2):  # drawn in each batch
        few = torch.randperm(16, generator=again)[:5]
        wide = few if scope == "both" else torch.arange(16)
        intra = intra_class(z[wide], y[wide], "code")
        wanted = cross_entropy(site.net.head(z), y) + 0.3 * intra
        wanted = wanted + 0.7 * inter_class(z[few], y[few], g["mean"], known, known)
        assert_close(objective(site.net, x, y), wanted)


# Table 8: added to other methods

added = pytest.mark.parametrize("base", [name for name in BASES if name != "fedavg"])


@added
def test_without_its_terms_it_is_its_base_bit_for_bit(base: Any) -> None:
    plain, plain_clients = rounds(digits(BASES[base], split=PCDD), 3)
    ours, our_clients = rounds(digits(FedMR(mu1=0, mu2=0, base=base), split=PCDD), 3)
    assert same(ours[-1].server, plain[-1].server)
    assert all(our_clients.store.get(c) == plain_clients.store.get(c) for c in range(5))


@added
def test_its_terms_join_those_of_its_base(base: Any) -> None:
    """A prototype margin changes the second round; what the base keeps and sends is still there."""
    plain, _ = rounds(digits(BASES[base], split=PCDD), 2)
    ours, _ = rounds(digits(FedMR(mu1=0, mu2=1, base=base), split=PCDD), 2)
    assert ours[-1].server.keys() == plain[-1].server.keys() | {GROUP}
    assert ours[-1].bytes_up.keys() == plain[-1].bytes_up.keys() | {GROUP}
    assert same(model_of(ours[0].server), model_of(plain[0].server))
    assert not same(model_of(ours[1].server), model_of(plain[1].server))


def test_moon_and_the_margin_see_one_pass_through_the_body() -> None:
    """L = CE + mu l_con + mu2 l_inter: the value is the sum of its parts, the body runs once a batch."""
    base = BASES["moon"]
    world = digits(FedMR(mu1=0, mu2=0.5, base="moon"), split=PCDD)
    records, simulation = rounds(world, 1)
    broadcast, state = records[0].server, decode(simulation.store.get(0))
    site = world.site(0, 1, "train")
    site.load(broadcast)
    x, y = site.data.take(torch.arange(12))
    mean_distance = base.objective(site, broadcast, state)(site.net, x, y)
    margin = world.method.reshaped(site, broadcast)(site.net, x, y) - cross_entropy(site.net(x), y)
    reshaping = replace(site, loss=world.method.reshaped(site, broadcast))
    assert margin > 0
    together = base.objective(reshaping, broadcast, state)
    passes: list[int] = []
    handle = site.net.body.register_forward_hook(lambda *_: passes.append(1))
    assert_close(together(site.net, x, y), mean_distance + margin)
    handle.remove()
    assert len(passes) == 1


# Table 7: the measurement


def test_the_spread_of_eigenvalues_is_lemma_1_over_the_batch() -> None:
    """Classes 0 and 1: (2.117143 + 1.5) / 2 over 8 samples; the class of one sample says nothing."""
    assert eigenvalue_spread(Z, Y) == pytest.approx((2.117143 + 1.5) / 2 / 8, abs=1e-6)
    assert eigenvalue_spread(Z[-1:], Y[-1:]) == 0


def test_only_the_top_eigenvalues_count() -> None:
    """Top 2 of X: 2.070805 and .910248, (difference)^2 / 2 = .673446, over 4 samples .168362."""
    assert eigenvalue_spread(X, ONE, top=2) == pytest.approx(0.168362, abs=1e-6)


def test_collapsed_features_have_the_larger_spread() -> None:
    line = normal(0, 60, 1) * torch.ones(8) + 0.01 * normal(1, 60, 8)
    y = torch.zeros(60, dtype=torch.int64)
    assert eigenvalue_spread(line, y) > 10 * eigenvalue_spread(normal(2, 60, 8), y)
    assert eigenvalue_spread(torch.zeros(60, 8), y) == 0


def test_a_net_s_collapse_is_the_mean_over_its_batches_in_evaluation_mode() -> None:
    world = digits(FedAvg(), model="resnet8")
    site = world.site(0, 0, "train")
    site.load()
    data = world.pool(torch.arange(70))
    order = torch.randperm(70, generator=torch.Generator().manual_seed(4))
    spreads = [
        eigenvalue_spread(site.infer(site.net.body, data.part(p)), data.part(p).labels, 5) for p in order[:60].split(30)
    ]
    site.net.train()
    found = feature_collapse(site.net, data, torch.Generator().manual_seed(4), batch=30, top=5)
    assert found == pytest.approx(sum(spreads) / 2, rel=1e-4)
    small = feature_collapse(site.net, data.part(torch.arange(20)), torch.Generator().manual_seed(4))
    assert 0 < small < math.inf


def test_heads_are_as_far_apart_as_their_parameters() -> None:
    """Heads (0, 0 | 0) and (3, 0 | 4): distance 5; bodies are not looked at."""
    models = [
        {"parameters": Tensors({"body.w": tensor([b]), "head.weight": tensor([[w, 0.0]]), "head.bias": tensor([c])})}
        for b, w, c in ((0.0, 0.0, 0.0), (9.0, 3.0, 4.0))
    ]
    assert_close(head_distances(models), tensor([[0.0, 5.0], [5.0, 0.0]], dtype=torch.float64))
