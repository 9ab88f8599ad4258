"""Client-level differential privacy: clipping and noise by hand, and dp-accounting's own numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import tensor

import fedskew
from fedskew.core.method import Update
from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Training
from fedskew.experiment.config import Experiment, from_dict
from fedskew.federation.accounting import noise_for, spent
from fedskew.federation.private import GROUPS, Plan, Privacy, private_updates, system_noise
from fedskew.federation.wire import digest
from fedskew.methods import REGISTRY
from fedskew.methods.fedavg import FedAvg

dp = pytest.importorskip("dp_accounting")

X: Payload = {"parameters": Tensors(w=tensor([1.0, 1.0]))}


def silent(n: int) -> torch.Tensor:
    return torch.zeros(n)


def plan(noise: float = 1.0, clip: float = 1.0) -> Plan:
    return Plan(noise, clip, 1e-5, 2, 2, seed=0)


def sent(*changes: tuple[float, float], weight: float = 1.0) -> list[Update]:
    return [Update({"parameters": Tensors(w=tensor([1.0 + a, 1.0 + b]))}, weight) for a, b in changes]


def test_changes_are_clipped_and_averaged_with_equal_weights() -> None:
    """(3, 4) has the norm 5 and becomes (.6, .8); (0, -.5) stays: the mean is (.3, .15), whatever the weights."""
    updates = [replace(u, weight=w) for u, w in zip(sent((3.0, 4.0), (0.0, -0.5)), (1.0, 99.0), strict=True)]
    made = private_updates(updates, X, plan(), silent)
    assert [u.weight for u in made] == [1.0, 1.0]
    for update in made:
        assert update.payload["parameters"]["w"].tolist() == pytest.approx([1.3, 1.15])


def test_the_bound_is_of_all_groups_together() -> None:
    """Change (3, 0), control 4 with the same scale: the norm is 5."""
    payload = sent((3.0, 0.0))[0].payload | {"control": Tensors(w=tensor([4.0]))}
    assert GROUPS["control"].scale == GROUPS["parameters"].scale == 1
    (made,) = private_updates([Update(payload, 1.0)], X, plan(), silent)
    assert made.payload["parameters"]["w"].tolist() == pytest.approx([1.6, 1.0])
    assert made.payload["control"]["w"].tolist() == pytest.approx([0.8])


def test_prototypes_are_weighted_by_the_share_of_the_class_at_each_client() -> None:
    """Client 0 has class 0 only, with mean 2; client 1 has 1 of 4 samples there, with mean 6: (2 + 6/4) / (5/4)."""
    first = {"prototypes": Tensors(mean=tensor([[2.0], [0.0]]), count=tensor([8.0, 0.0]))}
    second = {"prototypes": Tensors(mean=tensor([[6.0], [1.0]]), count=tensor([1.0, 3.0]))}
    made = private_updates([Update(first, 8.0), Update(second, 4.0)], {}, plan(noise=1e-6, clip=100.0), silent)
    assert len(made) == 2
    got = made[0].payload["prototypes"]
    assert got["mean"].flatten().tolist() == pytest.approx([2.8, 1.0])
    assert got["count"].tolist() == pytest.approx([625.0, 375.0])


def test_a_class_below_the_noise_is_not_known() -> None:
    lone = {"prototypes": Tensors(mean=tensor([[2.0], [5.0]]), count=tensor([1.0, 0.0]))}
    (made,) = private_updates([Update(lone, 1.0)], {}, plan(noise=1.0), silent)
    assert made.payload["prototypes"]["count"].tolist() == [0.0, 0.0]
    assert not made.payload["prototypes"]["mean"].any()


@pytest.mark.parametrize(("noise", "known"), [(0.2, True), (0.3, False)])
def test_a_class_is_known_from_two_deviations_of_its_noisy_count_on(noise: float, known: bool) -> None:
    """One client whose samples are all of class 0 counts 1; the noise on counts, scaled by 0.5, is 0.4 or 0.6."""
    lone = {"prototypes": Tensors(mean=tensor([[2.0], [5.0]]), count=tensor([1.0, 0.0]))}
    (made,) = private_updates([Update(lone, 1.0)], {}, plan(noise=noise), silent)
    assert made.payload["prototypes"]["count"].tolist() == [1000.0 if known else 0.0, 0.0]


@pytest.mark.parametrize("normal", [plan().draw(0), system_noise], ids=["seed", "os"])
def test_the_noise_on_the_sum_has_the_deviation_that_is_accounted_for(normal) -> None:  # type: ignore[no-untyped-def]
    """z C = 1.5 on the sum of 4 updates, 0.375 on their mean; 20000 values, so the deviation is within 2 %."""
    n = 20_000
    zero: Payload = {"parameters": Tensors(w=torch.zeros(n))}
    made = private_updates([Update(zero, 1.0)] * 4, zero, plan(noise=3.0, clip=0.5), normal)
    w = made[0].payload["parameters"]["w"].double()
    assert float(w.std()) == pytest.approx(0.375, rel=0.02)
    assert abs(float(w.mean())) < 4 * 0.375 / math.sqrt(n)
    assert float(((w / 0.375) ** 4).mean()) == pytest.approx(3, rel=0.1)  # as of a normal distribution


def test_a_round_that_was_released_twice_is_one_round_less_to_come() -> None:
    """A simulation resumed on another machine repeats round 0 with other bits: of 5 rounds 4 are still to come."""
    simulated = plan()
    for value in (1.0, 2.0):
        simulated.ledger.record(0, 1.0, tensor([value]))
    assert len(simulated.ledger.releases) == 2
    assert simulated.to_come(5, 1) == 4


def test_epsilon_is_dp_accounting_s() -> None:
    """All clients: C changes, no drawing. 10 of 100: exchange of one client, so 2 C, drawn without replacement."""
    relation = dp.NeighboringRelation
    book = dp.rdp.RdpAccountant(neighboring_relation=relation.ADD_OR_REMOVE_ONE)
    book.compose(dp.GaussianDpEvent(1.0), 30)
    assert spent(1.0, 30, 10, 10, 1e-5) == pytest.approx(book.get_epsilon(1e-5), rel=1e-9)
    assert spent(1.0, 30, 10, 10, 1e-2) == pytest.approx(29.8, abs=0.1)
    book = dp.rdp.RdpAccountant(neighboring_relation=relation.REPLACE_ONE)
    book.compose(dp.SampledWithoutReplacementDpEvent(100, 10, dp.GaussianDpEvent(2.0)), 30)
    assert spent(4.0, 30, 10, 100, 1e-5) == pytest.approx(book.get_epsilon(1e-5), rel=1e-9)


def test_a_single_gaussian_by_hand() -> None:
    """Renyi divergence of order a is a / (2 z^2). With the classical conversion, over all a > 1, z = 5 and delta 1e-5:
    eps = 1/50 + sqrt(2 ln(1e5)) / 5 = 0.98; dp-accounting's conversion is a little better, never worse."""
    classical = 1 / 50 + math.sqrt(2 * math.log(1e5)) / 5
    assert 0.7 * classical < spent(5.0, 1, 9, 9, 1e-5) <= classical * 1.001


@pytest.mark.slow
@pytest.mark.parametrize(("cohort", "population"), [(200, 200), (20, 200)])
def test_a_budget_picks_the_smallest_noise_that_keeps_it(cohort: int, population: int) -> None:
    noise = noise_for(8.0, 20, cohort, population, 1e-5)
    assert spent(noise, 20, cohort, population, 1e-5) <= 8
    assert spent(noise * 0.99, 20, cohort, population, 1e-5) > 8


def test_between_sites_drawing_clients_is_not_counted_as_privacy() -> None:
    """Sites are told the seed that draws the cohorts."""
    privacy = Privacy(noise=1.0)
    simulated, served = privacy.plan(10, 5, 50, seed=0), privacy.plan(10, 5, 50, seed=None)
    assert simulated is not None
    assert served is not None
    assert served.epsilon(10) == spent(1.0, 10, 50, 50, 1e-5)
    assert simulated.epsilon(10) == spent(1.0, 10, 5, 50, 1e-5)


def experiment(method: str = "fedavg", **options: object) -> Experiment:
    values = {"method": method, "split": "sample:keep=300+iid:clients=6", "model": "mlp:hidden=8", "rounds": 2}
    return from_dict(values | {"privacy": {"noise": 0.5}} | options)


@pytest.mark.parametrize("method", ["fedavg", "fedmr", "fedcrc", "fedprox", "scaffold", "fednova", "vhl"])
def test_a_run_ends_with_the_epsilon_of_its_rounds(method: str) -> None:
    run = fedskew.run(experiment(method))
    records = list(run)
    assert [r.epsilon for r in records] == [spent(0.5, n, 6, 6, 1e-5) for n in (1, 2)]
    assert run.result is not None
    assert run.result.epsilon == records[-1].epsilon
    assert records[0].as_dict()["epsilon"] == records[0].epsilon


def test_without_noise_and_with_a_large_bound_it_is_the_plain_mean_of_equal_weights() -> None:
    """Six clients of equal size: FedAvg's own mean, up to rounding."""
    private, plain = experiment(privacy={"noise": 1e-9, "clip": 1e6}), experiment(privacy={})
    (*_, a), (*_, b) = list(fedskew.run(private)), list(fedskew.run(plain))
    for name, t in b.server["parameters"].items():
        torch.testing.assert_close(a.server["parameters"][name], t, atol=1e-3, rtol=1e-3)
    assert b.epsilon is None
    assert "epsilon" not in b.as_dict()


@pytest.mark.usefixtures("quick_workers")
def test_the_noise_is_the_same_for_any_number_of_workers_and_differs_by_seed() -> None:
    found = [
        digest(list(fedskew.run(replace(experiment(), seed=seed), workers=workers))[-1].server)
        for seed, workers in ((0, 1), (0, 2), (1, 1))
    ]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("name", [name for name, kind in REGISTRY.items() if not kind.sums_only and not kind.public])
def test_methods_that_need_single_models_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="single clients"):
        fedskew.run(experiment(name))


@pytest.mark.parametrize("name", ["ccvr", "creff", "fedexp"])
def test_what_cannot_be_clipped_sensibly_is_refused_before_anything_is_released(name: str) -> None:
    run = fedskew.run(experiment(name))
    with pytest.raises(UsageError, match="cannot have differential privacy"):
        list(run)


def test_batch_norm_statistics_are_refused_and_frozen_ones_are_not() -> None:
    net = {"data": "digits", "model": "resnet8"}
    with pytest.raises(UsageError, match="batch_norm to frozen"):
        list(fedskew.run(experiment(**net)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"noise": 1.0, "epsilon": 8.0}, "exclude each other"),
        ({"epsilon": 1e-9}, "cannot be reached"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"noise": 1.0, "delta": 0.0}, "delta"),
        ({"min_count": 0}, "min_count"),
    ],
)
def test_mistakes_get_one_sentence(values: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        list(fedskew.run(experiment(privacy=values)))


def test_robust_aggregation_and_noise_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        fedskew.run(experiment(robust={"rule": "median"}))


def test_few_clients_are_warned() -> None:
    few, many = Privacy(noise=1.0).plan(30, 10, 10, 0), Privacy(epsilon=4.0).plan(30, 200, 200, 0)
    assert few is not None
    assert many is not None
    assert "says little here: epsilon is 39.8" in few.warning(30)
    assert many.warning(30) == ""


def test_the_settings_survive_toml_and_are_left_out_where_they_change_nothing() -> None:
    given = Experiment(FedAvg(), training=Training(), privacy=Privacy(min_count=3, epsilon=8.0))
    assert from_dict(given.as_dict()) == given
    assert given.as_dict()["privacy"]["epsilon"] == 8.0
    assert "privacy" not in Experiment().as_dict()
