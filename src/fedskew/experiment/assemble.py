"""An experiment made ready to run: data loaded and split, the net chosen, mistakes found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import nn

from fedskew.core.settings import UsageError, parse
from fedskew.data.dataset import DataSet
from fedskew.data.public import with_public
from fedskew.data.sources.loading import load
from fedskew.data.split.chain import make_partition
from fedskew.data.split.partition import Partition, Parts, draw_newcomers, portion
from fedskew.experiment.config import Experiment
from fedskew.federation.cohort import draw_cohort
from fedskew.federation.world import World, make_world
from fedskew.models import build as build_net
from fedskew.models import wrap


@dataclass(frozen=True, kw_only=True)
class Lineup:
    """The world of a run, and which of its clients do what."""

    world: World
    members: tuple[int, ...]  # clients that may train
    newcomers: tuple[int, ...]  # clients that never do
    evaluated: tuple[int, ...]  # clients whose own test part is evaluated
    cohort_size: int  # clients asked in a round
    quorum: int  # usable updates a round needs

    def cohort(self, round: int) -> list[int]:
        """The clients asked in this round."""
        return draw_cohort(self.members, self.cohort_size, self.world.seed, round)


@dataclass(frozen=True, kw_only=True)
class Assembled(Lineup):
    """An experiment ready to run: data loaded and split, the net chosen, mistakes found."""

    data: DataSet
    partition: Partition


def line_up(experiment: Experiment, members: Sequence[int]) -> tuple[int, int]:
    """(clients asked in a round, updates it needs) when these clients may train."""
    size = part_of(experiment.clients_per_round, len(members), "clients_per_round")
    return size, part_of(experiment.trouble.quorum, size, "quorum")


def part_of(value: float | str, whole: int, what: str) -> int:
    """A count, or a share below 1, of `whole`; 'all' is all of it."""
    if value == "all":
        return whole
    try:
        number = float(value)
    except ValueError:
        raise UsageError(f"{what}={value!r} is invalid: expected a count, a share below 1, or all.") from None
    if 0 < number < 1 or (number == 1 and isinstance(value, float)) or value == "1.0":
        return max(1, int(number * whole))
    if number != int(number) or not 1 <= number <= whole:
        raise UsageError(
            f"{what}={value} is invalid: there are {whole} clients; expected 1 to {whole}, or a share below 1."
        )
    return int(number)


def model_text(model: str, data: DataSet) -> str:
    """`auto` made concrete: a small CNN for images of 28 pixels and more, else an MLP."""
    if model != "auto":
        return model
    return "simple-cnn" if len(data.shape) == 3 and min(data.shape[1:]) >= 28 else "mlp"


def net_maker(experiment: Experiment, data: DataSet) -> Callable[[], Any]:
    """What makes the net; tried at once, so that a model that does not fit is a mistake now, not in a worker."""
    if isinstance(experiment.model, nn.Module):
        own = partial(wrap, experiment.model, experiment.head)
        own()
        return own
    steps = parse(model_text(experiment.model, data), "model")
    if len(steps) > 1:
        raise UsageError(f"model '{experiment.model}' has more than one part; name one model.")
    name, options = steps[0][0], cast(dict[str, Any], steps[0][1])
    fast = experiment.step == "fast"
    make = partial(build_net, name, data.shape, data.classes, seed=experiment.seed, fast=fast, **options)
    make()
    return make


def on_validation(world: World) -> World:
    """The world whose test parts are the validation parts, with no test set beside them: what tuning may look at."""
    if not len(world.validation.values):
        raise UsageError(
            "evaluation.part=validation needs validation data: give holdout.validation a share, such as 0.2."
        )
    return dataclasses.replace(world, test=world.validation, x_test=world.x_test[:0], y_test=world.y_test[:0])


def public_data(experiment: Experiment, folder: Path | None) -> DataSet:
    if experiment.public == experiment.data:
        raise UsageError(
            "the public set is the clients' own data set: cut from it what no client gets, "
            f"with the split public:per_class=20+{experiment.split}."
        )
    return load(experiment.public, folder) if isinstance(experiment.public, str) else experiment.public


def assemble(experiment: Experiment, *, data_dir: Path | None = None, device: str = "cpu") -> Assembled:
    """Everything a run needs: data loaded and split, the net chosen. Mistakes are found here, before it starts."""
    data = load(experiment.data, data_dir) if isinstance(experiment.data, str) else experiment.data
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
            f"method {experiment.method_name} needs public data on the server: begin the split with "
            f"'public:per_class=20+', as in public:per_class=20+{experiment.split}, or give your own with public=..."
        )
    holdout = experiment.holdout
    parts = portion(partition, validation=holdout.validation, test=holdout.test, seed=experiment.seed)
    population = len(parts)
    new = draw_newcomers(population, holdout.newcomers, experiment.seed) if holdout.newcomers else ()
    members = tuple(c for c in range(population) if c not in set(new))
    size, quorum = line_up(experiment, members)
    if experiment.method.pooled:
        parts, members, size, quorum = in_one_place(partition, parts, members), (0,), 1, 1
    world = world_of(experiment, pool, partition, parts, device)
    if experiment.evaluation.part == "validation":
        world = on_validation(world)
    wanted = experiment.evaluation.clients or population
    evaluated = draw_cohort(range(population), min(wanted, population), experiment.seed, -1)
    return Assembled(
        world=world,
        data=data,
        partition=partition,
        members=members,
        newcomers=new,
        evaluated=tuple(evaluated),
        cohort_size=size,
        quorum=quorum,
    )


def world_of(experiment: Experiment, data: DataSet, partition: Partition, parts: Sequence[Parts], device: str) -> World:
    """The experiment's method, net and training over these data, dealt so."""
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
    )


def in_one_place(partition: Partition, parts: Sequence[Parts], members: Sequence[int]) -> tuple[Parts, ...]:
    """The first client holds what all members would train on; everybody keeps the samples to be evaluated by."""
    if partition.noise or partition.rotation:
        raise UsageError("central cannot pool clients whose inputs differ: leave noise and rotate out of the split.")
    every = np.concatenate([parts[c].train for c in members])
    return tuple(replace(own, train=every if c == 0 else every[:0]) for c, own in enumerate(parts))
