"""An experiment as a value: its TOML form, what it puts together, your own nets and data."""

import tomllib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedskew
from fedskew.core.settings import UsageError
from fedskew.core.training import Training
from fedskew.experiment.assemble import assemble, part_of
from fedskew.experiment.config import Evaluation, Experiment, Holdout, Trouble, from_dict
from fedskew.methods import REGISTRY

SMALL = Experiment(split="dirichlet:alpha=0.5,clients=4", model="mlp", rounds=2)


@pytest.mark.parametrize("name", REGISTRY)
def test_every_method_survives_its_toml_form(name: str) -> None:
    experiment = replace(SMALL, method=REGISTRY[name](), clients_per_round=0.5, seed=7)
    assert from_dict(tomllib.loads(experiment.to_toml())) == experiment


def test_every_setting_survives_the_toml_form() -> None:
    experiment = Experiment(
        method=REGISTRY["fedcrc"](epochs=(1, 2, 3)),  # type: ignore[call-arg]
        data="mnist",
        split="longtail:factor=50+iid",
        model="cnn4:track=true",
        rounds=9,
        clients_per_round=3,
        seed=11,
        training=Training(
            "adam", 0.01, "cosine", weight_decay=0.1, steps=5, clip=1.0, augment="flip", batch_norm="local"
        ),
        holdout=Holdout(test=0.1, validation=0.1, newcomers=2, pool="all"),
        evaluation=Evaluation(every=3, clients=10),
        trouble=Trouble(dropout=0.05, fault="nan:rate=0.1", quorum=2),
        step="plain",
    )
    assert from_dict(tomllib.loads(experiment.to_toml())) == experiment


@pytest.mark.parametrize(
    ("value", "whole", "count"),
    [("all", 10, 10), (3, 10, 3), (0.25, 10, 2), (0.01, 10, 1), (1.0, 10, 10), ("0.5", 9, 4), (1, 5, 1)],
)
def test_a_cohort_is_a_count_or_a_share(value: float | str, whole: int, count: int) -> None:
    assert part_of(value, whole, "clients_per_round") == count


@pytest.mark.parametrize("value", [0, 11, -1, 2.5, "some", "nan", "inf", float("nan"), "1e400", None, [3]])
def test_a_cohort_that_cannot_be_is_a_mistake(value: Any) -> None:
    with pytest.raises(UsageError, match="clients_per_round"):
        part_of(value, 10, "clients_per_round")


def test_parts_newcomers_and_the_public_set_do_not_overlap() -> None:
    holdout = Holdout(test=0.2, validation=0.1, newcomers=0.25)
    setting = assemble(replace(SMALL, split="public:per_class=5+iid:clients=8", holdout=holdout))
    world = setting.world
    pieces = [world.public, *(part[c] for part in (world.train, world.validation, world.test) for c in range(8))]
    together = torch.cat(pieces)
    assert len(together.unique()) == len(together) == len(world.y)
    assert len(world.public) == 50
    assert len(setting.newcomers) == 2
    assert not set(setting.newcomers) & {c for r in range(20) for c in setting.cohort(r)}


def test_pooling_deals_train_and_test_together() -> None:
    setting = assemble(replace(SMALL, holdout=Holdout(pool="all")))
    assert len(setting.data.y_train) == 1797
    assert len(setting.data.y_test) == 0
    run = fedskew.run(replace(SMALL, rounds=1, holdout=Holdout(pool="all")))
    (record,) = run
    assert record.metrics is not None
    assert record.metrics.global_ is None
    assert run.result.accuracy == record.metrics.clients.global_.mean


def test_a_quorum_is_a_share_of_the_cohort_not_of_all_clients() -> None:
    setting = assemble(replace(SMALL, clients_per_round=2, trouble=Trouble(quorum=0.5)))
    assert (setting.cohort_size, setting.quorum) == (2, 1)


def test_an_evaluation_on_validation_data_sees_no_test_data() -> None:
    holdout = Holdout(test=0.2, validation=0.1)
    tested = assemble(replace(SMALL, holdout=holdout)).world
    tuned = assemble(replace(SMALL, holdout=holdout, evaluation=Evaluation(part="validation"))).world
    assert torch.equal(tuned.test.values, tested.validation.values)
    assert (len(tuned.x_test), len(tuned.y_test)) == (0, 0)
    assert len(tested.y_test) > 0
    with pytest.raises(UsageError, match=r"holdout\.validation"):
        assemble(replace(SMALL, evaluation=Evaluation(part="validation")))


def test_central_pools_what_members_train_on_and_nothing_of_newcomers() -> None:
    holdout = Holdout(test=0.2, newcomers=1)
    pooled = assemble(replace(SMALL, method=REGISTRY["central"](), holdout=holdout))
    apart = assemble(replace(SMALL, holdout=holdout))
    everybodys = torch.cat([apart.world.train[c] for c in apart.members])
    assert torch.equal(pooled.world.train[0].sort().values, everybodys.sort().values)
    assert pooled.world.train.sizes()[1:] == [0, 0, 0]
    assert torch.equal(pooled.world.test.values, apart.world.test.values)


def test_dropout_and_named_faults_are_both_planned() -> None:
    assert [fault.kind for fault in Trouble(dropout=0.1, fault="nan:rate=0.5").faults()] == ["drop", "nan"]
    assert Trouble().faults() == ()


def test_the_closing_figures_are_sums_over_rounds_and_clients() -> None:
    run = fedskew.run(replace(SMALL, trouble=Trouble(fault="nan:client=1+nan:client=2,round=1")))
    records = list(run)
    assert [len(record.lost) for record in records] == [1, 2]
    assert run.result.lost == 3
    assert run.result.bytes_up == sum(sum(record.bytes_up.values()) for record in records)
    assert run.result.bytes_down == sum(sum(record.bytes_down.values()) for record in records)
    assert run.result.client_seconds == sum(record.client_seconds for record in records)


def test_a_method_that_needs_public_data_says_how_to_give_it() -> None:
    class Needy(fedskew.Method):
        public = True

    with pytest.raises(UsageError, match="public:per_class"):
        assemble(replace(SMALL, method=Needy()))


class Own(nn.Module):
    """A net of a user's own, whose last layer is called `out`."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.hidden, self.out = nn.Flatten(), nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.hidden(self.flat(x))))


@pytest.mark.parametrize("method", ["fedavg", "fedper", "scaffold"])
def test_any_module_trains_by_the_name_of_its_last_layer(method: str) -> None:
    run = fedskew.run(replace(SMALL, model=Own(), head="out", method=REGISTRY[method]()))
    list(run)
    assert run.result.accuracy > 0.1
    with pytest.raises(UsageError, match="head 'fc' is invalid"):
        assemble(replace(SMALL, model=Own(), head="fc"))


def test_any_torch_data_set_trains() -> None:
    rng = np.random.default_rng(0)
    y = torch.from_numpy(rng.integers(0, 3, 200))
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(0)) + 3 * nn.functional.one_hot(y, 6)
    data = fedskew.from_dataset(TensorDataset(x, y), name="mine")
    run = fedskew.run(replace(SMALL, data=data, rounds=5))
    list(run)
    assert run.result.accuracy > 0.8


def test_evaluation_can_be_sparse_but_the_last_round_has_it() -> None:
    records = list(fedskew.run(replace(SMALL, rounds=5, evaluation=Evaluation(every=3, clients=2))))
    assert [r.metrics is not None for r in records] == [False, False, True, False, True]
    assert records[-1].metrics is not None
    assert records[-1].metrics.clients.personal.clients == 2
    assert records[-1].metrics.clients.sampled


def test_the_plain_step_gives_the_same_result_to_rounding() -> None:
    fast, plain = (fedskew.run(replace(SMALL, step=step, rounds=1)) for step in ("fast", "plain"))
    (a,), (b,) = list(fast), list(plain)
    apart = a.server["parameters"] - b.server["parameters"]
    assert float(apart.dot(apart)) < 1e-8


@pytest.mark.parametrize("policy", ["aggregate", "local", "frozen"])
def test_batch_norm_policies_end_to_end(policy: str) -> None:
    """What is sent, what stays, and that a global model without statistics is still judged."""
    data = fedskew.load_data("digits")
    wide = np.repeat(np.repeat(data.x_train[:300], 2, axis=1), 2, axis=2)
    test = np.repeat(np.repeat(data.x_test[:100], 2, axis=1), 2, axis=2)
    big = replace(data, x_train=wide, y_train=data.y_train[:300], x_test=test, y_test=data.y_test[:100])
    training = Training(lr=0.05, batch_size=16, batch_norm=policy)  # type: ignore[arg-type]
    run = fedskew.run(replace(SMALL, data=big, model="cnn4:track=true", training=training, rounds=2))
    records = list(run)
    assert ("buffers" in records[-1].bytes_up) == (policy == "aggregate")
    metrics = records[-1].metrics
    assert metrics is not None
    assert metrics.global_.loss < 50
    shared, own = metrics.clients.global_.mean, metrics.clients.personal.mean
    assert (shared == own) == (policy != "local")


def spacing(samples: int, test: int, **changes: Any) -> int:
    """The rounds between evaluations of 10 clients with equal parts of `samples`, and a test set of `test`."""
    x, y = np.zeros((samples + test, 2), np.float32), np.arange(samples + test) % 2
    data = fedskew.DataSet("even", x[test:], y[test:], x[:test], y[:test], classes=2)
    experiment = Experiment(data=data, split="iid:clients=10", rounds=1000, **changes)
    return assemble(experiment).evaluate_every


def test_automatic_evaluation_takes_a_tenth_of_the_work_by_sample_counts() -> None:
    """4,000 samples: 3,200 to train, 800 to test. 9 * 1,000 evaluated over 3 * 3,200 trained is 0.94, so every round.

    With one client of ten per round 9.4, so 10; with 5 epochs 1.9, so 2; with 1 step of 32 samples 94; evaluating
    two models, 1,800 samples instead of 1,000, 16.9.
    """
    assert spacing(4000, 200) == 1
    one = {"clients_per_round": 1}
    assert spacing(4000, 200, **one) == 10
    assert spacing(4000, 200, training=Training(epochs=5), **one) == 2
    assert spacing(4000, 200, training=Training(steps=1), **one) == 94
    assert spacing(4000, 200, method=fedskew.FedPer(), **one) == 17
    assert spacing(4000, 200, evaluation=Evaluation(clients=1), **one) == 3
    assert spacing(4000, 200, evaluation=Evaluation(every=7), **one) == 7


def test_automatic_evaluation_is_every_round_where_all_of_it_is_small() -> None:
    """100 samples evaluated 1,000 times are 100,000, a second of work."""
    assert spacing(400, 20, clients_per_round=1) == 1


@pytest.mark.parametrize(("text", "value"), [("5", 5), ("auto", "auto")])
def test_the_spacing_of_evaluations_can_be_given_as_text(text: str, value: object) -> None:
    assert from_dict({"evaluation": {"every": text}}).evaluation.every == value


@pytest.mark.parametrize("wrong", [0, "often", 1.5, -1])
def test_a_wrong_spacing_of_evaluations_is_a_usage_error(wrong: object) -> None:
    with pytest.raises(UsageError, match="every"):
        from_dict({"evaluation": {"every": wrong}})
