"""Prepares an experiment: loads and splits the data, chooses the net, and reports errors in the settings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fedskew.core.settings import UsageError
from fedskew.data.dataset import DataSet, moments
from fedskew.data.notes import id_columns, large_numbers, missing_values, owners_ignored, owners_without_training
from fedskew.data.public import with_public
from fedskew.data.sources.loading import load
from fedskew.data.split.chain import make_partition
from fedskew.data.split.features import FEATURES
from fedskew.data.split.partition import Partition, Parts, draw_newcomers, portion
from fedskew.data.table import Preparation, agree_on, prepared, sums_of
from fedskew.evaluation.figures import check_goal
from fedskew.experiment.config import Experiment
from fedskew.experiment.nets import net_maker
from fedskew.federation.cohort import draw_cohort
from fedskew.federation.make_world import make_world
from fedskew.federation.world import World

EVALUATION_SHARE = 0.1  # of a run's work, with evaluation.every=auto
FEW_SAMPLES = 200_000  # evaluated in the whole run: seconds for a small net, so evaluation.every=auto is every round


@dataclass(frozen=True, kw_only=True)
class Lineup:
    """The world of a run, and the roles of its clients."""

    world: World
    members: tuple[int, ...]  # clients that may train
    newcomers: tuple[int, ...]  # clients that never train
    evaluated: tuple[int, ...]  # clients that are evaluated on their own test samples
    cohort_size: int  # clients asked to train in a round
    quorum: int  # usable updates a round needs
    evaluate_every: int = 1  # rounds between evaluations

    def cohort(self, round: int) -> list[int]:
        """The clients asked to train in this round."""
        return draw_cohort(self.members, self.cohort_size, self.world.seed, round)


@dataclass(frozen=True, kw_only=True)
class Assembled(Lineup):
    """An experiment that is ready to run."""

    data: DataSet
    partition: Partition
    table: Preparation | None = None  # how a table becomes inputs; None: the data are no table
    notes: tuple[str, ...] = ()  # what the user should know about data and split
    owners: tuple[str, ...] = ()  # the clients' names, if each is one owner; (): they have none

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes; their numbers if they have no names."""
        return self.data.labels or tuple(map(str, range(self.data.classes)))

    def with_world(self, world: World) -> Assembled:
        """This with an equal world whose arrays are elsewhere, in shared memory, so that the loaded ones are freed."""
        data = self.data
        if data.x_train.ctypes.data == self.world.x.data_ptr():
            data = replace(data, x_train=world.x.numpy())
        if data.x_test.ctypes.data == self.world.x_test.data_ptr():
            data = replace(data, x_test=world.x_test.numpy())
        return replace(self, world=world, data=data)


def cohort_size_and_quorum(experiment: Experiment, members: int) -> tuple[int, int]:
    """(clients asked to train in a round, usable updates it needs) if `members` clients may train."""
    size = part_of(experiment.clients_per_round, members, "clients_per_round")
    if experiment.robust.on:
        experiment.robust.check(size)
        if not experiment.method.sums_only:
            raise UsageError(
                f"method {experiment.method_name} uses the models of single clients, which robust aggregation hides: "
                "expected a method whose server needs only sums (`fedskew methods` lists them)."
            )
    check_privacy(experiment)
    return size, part_of(experiment.trouble.quorum, size, "quorum")


def check_privacy(experiment: Experiment) -> None:
    """Raise UsageError if the experiment asks for differential privacy that its method cannot have."""
    if not experiment.privacy.on:
        return
    if not experiment.method.sums_only:
        raise UsageError(
            f"method {experiment.method_name} uses the models of single clients, so it cannot have differential "
            "privacy: expected a method whose server needs only sums (`fedskew methods` lists them)."
        )
    if experiment.robust.on:
        raise UsageError("robust aggregation and differential privacy exclude each other: noise needs the plain sum.")
    if experiment.method.pooled:
        raise UsageError(f"method {experiment.method_name} trains on all data in one place: no client is protected.")


def part_of(value: float | str, total: int, what: str) -> int:
    """A count from a setting: a count itself, a share (below 1, or 1.0) of `total`, or "all".

    A share gives at least 1. `what` names the setting in an error.

    >>> part_of(3, 10, "quorum"), part_of(0.25, 10, "quorum"), part_of("all", 10, "quorum")
    (3, 2, 10)
    """
    if value == "all":
        return total
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{what}={value!r} is invalid: expected a count, a share below 1, or all.") from None
    if 0 < number < 1 or (number == 1 and isinstance(value, float)) or value == "1.0":
        return max(1, int(number * total))
    if not 1 <= number <= total or number != int(number):  # in this order: nan and inf are no int
        raise UsageError(
            f"{what}={value} is invalid: there are {total} clients; expected 1 to {total}, or a share below 1."
        )
    return int(number)


def on_validation(world: World) -> World:
    """The world with validation samples in place of test samples, and without the server's test set, for tuning."""
    if not len(world.validation.values):
        raise UsageError(
            "evaluation.part=validation needs validation data: set holdout.validation to a share, such as 0.2."
        )
    return dataclasses.replace(world, test=world.validation, x_test=world.x_test[:0], y_test=world.y_test[:0])


def check_stop(experiment: Experiment, world: World) -> None:
    """Raise UsageError if the experiment is to stop early but cannot."""
    if not experiment.stop.patience:
        return
    check_goal(experiment.stop.figure or None)
    if not len(world.validation.values):
        raise UsageError(
            "stop needs validation data, because test data must not decide when a run ends: "
            "set holdout.validation to a share, as with --set holdout.validation=0.2."
        )


def public_data(experiment: Experiment, folder: Path | None) -> DataSet:
    """The data set of the setting `public`. It must not be the one that is split among the clients."""
    if experiment.public == experiment.data:
        raise UsageError(
            "public and data are the same data set: to set samples of it aside for the server, "
            f"leave public empty and use the split public:per_class=20+{experiment.split}."
        )
    return load(experiment.public, folder) if isinstance(experiment.public, str) else experiment.public


def made_in_python(data: DataSet) -> DataSet:
    """A data set that the user made: with means and deviations if it has images; UsageError if values are missing."""
    if data.x_train.dtype == np.uint8 and not data.mean and len(data.x_train):
        mean, std = moments(data.x_train)
        return replace(data, mean=mean, std=std)
    for name, x in (("x_train", data.x_train), ("x_test", data.x_test)):
        if not data.columns and x.dtype != np.uint8 and not np.isfinite(x).all():
            raise UsageError(f"data: {name} has values that are missing or infinite: expected finite numbers.")
    return data


def assemble(
    experiment: Experiment, *, data_dir: Path | None = None, device: str = "cpu", loaded: DataSet | None = None
) -> Assembled:
    """Load and split the data and choose the net. Errors in the settings raise UsageError here, before the run starts.

    `data_dir` is where named data sets are; None is the default folder. `loaded` is the data set that the experiment
    names, if it was loaded before; None loads it.
    """
    if torch.get_default_dtype() != torch.float32:
        raise UsageError(
            f"torch's default type is {torch.get_default_dtype()}, but samples are float32: "
            "expected torch.set_default_dtype(torch.float32)."
        )
    if isinstance(experiment.data, str):
        data = load(experiment.data, data_dir) if loaded is None else loaded
    else:
        data = made_in_python(experiment.data)
    if experiment.holdout.pool == "all":
        data = data.pooled()
    partition = make_partition(
        experiment.split, data.y_train, seed=experiment.seed, classes=data.classes, owners=data.owners_train
    )
    pool = data
    if experiment.public:
        pool, partition = with_public(data, partition, public_data(experiment, data_dir))
    if experiment.method.public and not len(partition.public):
        raise UsageError(
            f"method {experiment.method_name} needs public data on the server: start the split with "
            f"'public:per_class=20+', as in public:per_class=20+{experiment.split}, or give a data set with public=..."
        )
    holdout = experiment.holdout
    parts = portion(partition, validation=holdout.validation, test=holdout.test, seed=experiment.seed)
    population = len(parts)
    new = draw_newcomers(population, holdout.newcomers, experiment.seed) if holdout.newcomers else ()
    members = tuple(c for c in range(population) if c not in set(new))
    size, quorum = cohort_size_and_quorum(experiment, len(members))
    if experiment.method.pooled:
        parts, members, size, quorum = pool_training_data(partition, parts, members), (0,), 1, 1
    table = None
    lost = owners_without_training(data) if "natural" in experiment.split else owners_ignored(data, experiment.split)
    notes = (*partition.notes, *filter(None, [lost]))
    if data.columns:
        table = agree_on({f"client {c}": sums_of(pool.x_train[parts[c].train], pool.columns) for c in members})
        notes = (*notes, *filter(None, [table.describe(missing_values(pool)), *id_columns(pool)]))
        pool, data = prepared(pool, table), prepared(data, table)
    elif note := large_numbers(pool.x_train):
        notes = (*notes, note)
    world = world_of(experiment, pool, partition, parts, device)
    check_stop(experiment, world)
    if experiment.evaluation.part == "validation":
        world = on_validation(world)
    wanted = experiment.evaluation.clients or population
    evaluated = draw_cohort(range(population), min(wanted, population), experiment.seed, -1)
    return Assembled(
        world=world,
        data=data,
        partition=partition,
        table=table,
        notes=notes,
        owners=client_names(data, partition),
        members=members,
        newcomers=new,
        evaluated=tuple(evaluated),
        cohort_size=size,
        quorum=quorum,
        evaluate_every=evaluation_spacing(experiment, world, evaluated, members, size),
    )


def evaluation_spacing(
    experiment: Experiment, world: World, evaluated: Sequence[int], members: Sequence[int], cohort_size: int
) -> int:
    """The rounds between evaluations: `evaluation.every`, or for "auto" a number that follows from sample counts.

    A sample that is trained on counts as three that are evaluated: its backward pass takes twice the forward pass.
    """
    every = experiment.evaluation.every
    if every != "auto":
        return every
    tests, trains = world.test.sizes(), world.train.sizes()
    models = 1 if world.uses_shared_model({}) and not experiment.method.personal else 2
    evaluation = len(world.y_test) + models * sum(tests[c] for c in evaluated)
    training, samples = experiment.training, sum(trains[c] for c in members) / max(len(members), 1)
    passed = samples * training.epochs if training.steps is None else training.steps * training.batch_size
    work = max(1.0, 3 * cohort_size * passed)
    if evaluation * world.rounds <= FEW_SAMPLES:
        return 1
    return min(world.rounds, max(1, math.ceil((1 - EVALUATION_SHARE) / EVALUATION_SHARE * evaluation / work)))


def client_names(data: DataSet, partition: Partition) -> tuple[str, ...]:
    """The owner of each client's samples, if every client has one and no other client has the same; else ()."""
    if data.owners_train is None or not data.owners:
        return ()
    owners = [np.unique(data.owners_train[samples]).tolist() for samples in partition.clients]
    if any(len(found) != 1 for found in owners) or len({found[0] for found in owners}) < len(owners):
        return ()
    return tuple(data.owners[found[0]] for found in owners)


def world_of(experiment: Experiment, data: DataSet, partition: Partition, parts: Sequence[Parts], device: str) -> World:
    """The world of an experiment on these data, split like this."""
    return make_world(
        data,
        partition,
        parts,
        method=experiment.method,
        training=experiment.training,
        make_net=net_maker(experiment, data),
        seed=experiment.seed,
        rounds=len(experiment.method.stages(experiment.rounds)),
        fast=experiment.step == "fast",
        device=device,
        min_count=experiment.privacy.min_count or 1,
    )


def pool_training_data(partition: Partition, parts: Sequence[Parts], members: Sequence[int]) -> tuple[Parts, ...]:
    """Give the first client the training samples of all members. Validation and test samples stay where they are."""
    if partition.features_differ:
        raise UsageError(f"central cannot pool clients with feature skew: remove {', '.join(FEATURES)} from the split.")
    train = np.concatenate([parts[c].train for c in members])
    return tuple(replace(part, train=train if c == 0 else train[:0]) for c, part in enumerate(parts))
