"""An experiment: everything that decides a result, as one value, and its TOML form."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import tomli_w
from torch import nn

from fedskew.data.dataset import DataSet
from fedskew.data.public import with_public
from fedskew.data.sources import load
from fedskew.data.splits import Deal, Parts, deal, newcomers, portion
from fedskew.federation.faults import Fault, parse_faults
from fedskew.federation.loop import draw_cohort
from fedskew.federation.world import World, make_world
from fedskew.method import Method
from fedskew.methods import REGISTRY
from fedskew.methods.fedavg import FedAvg
from fedskew.models import build as build_net
from fedskew.models import wrap
from fedskew.settings import Mistake, build, choose, parse, unknown
from fedskew.training import Count, Natural, Share, Training


@dataclass(frozen=True)
class Holdout:
    """What of each client's data does not train, and which clients never do."""

    test: Share = 0.2  # share of each client's samples: its own test part
    validation: Share = 0.0
    newcomers: int | float = 0  # clients that never train: a count, or a share below 1
    pool: Literal["train", "all"] = "train"  # what is dealt: the training part, or train and test merged


@dataclass(frozen=True)
class Evaluation:
    every: Count = 1  # rounds; the last is always evaluated
    clients: Natural = 0  # how many clients' own test parts, a fixed seeded sample; 0 is all
    part: Literal["test", "validation"] = "test"  # validation: its parts stand for the test parts; no test set is seen
    diagnose: bool = False  # closing figures say how far features collapsed and heads drifted (see diagnostics.py)


@dataclass(frozen=True)
class Trouble:
    """Clients that fail, and how many must not."""

    dropout: Share = 0.0  # each selected client is absent with this probability; one is always kept
    fault: str = ""  # e.g. nan:rate=0.1+die:client=3,round=2
    quorum: int | float = 1  # updates a round needs: a count, or a share below 1 of the cohort

    def faults(self) -> tuple[Fault, ...]:
        drop = (Fault("drop", self.dropout),) if self.dropout else ()
        return drop + parse_faults(self.fault)


@dataclass(frozen=True)
class Experiment:
    method: Method = field(default_factory=FedAvg)
    data: str | DataSet = "digits"
    split: str = "dirichlet:alpha=0.3,clients=10"
    model: str | nn.Module = "auto"  # or any module and the name of its last layer, see `head`
    head: str = ""  # the last layer's name, for a module of your own
    rounds: Count = 30
    clients_per_round: int | float | Literal["all"] = "all"  # a count, or a share below 1
    seed: Natural = 0
    training: Training = field(default_factory=Training)
    holdout: Holdout = field(default_factory=Holdout)
    evaluation: Evaluation = field(default_factory=Evaluation)
    trouble: Trouble = field(default_factory=Trouble)
    step: Literal["fast", "plain"] = "fast"  # plain: torch's own layers and optimisers, the reference
    public: str | DataSet = ""  # the server's public data, as `data`; or the split cuts them: public:per_class=20+...

    @property
    def method_name(self) -> str:
        return next((name for name, kind in REGISTRY.items() if kind is type(self.method)), type(self.method).__name__)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as in the TOML form."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain["data"] = self.data if isinstance(self.data, str) else self.data.name
        plain["model"] = self.model if isinstance(self.model, str) else type(self.model).__name__
        plain["public"] = self.public if isinstance(self.public, str) else self.public.name
        if not plain["public"]:
            del plain["public"]
        plain["method"] = {"name": self.method_name, **dataclasses.asdict(self.method)}
        for name in TABLES:
            plain[name] = dataclasses.asdict(plain[name])
        return {key: _without_none(value) for key, value in plain.items()}

    def to_toml(self) -> str:
        return tomli_w.dumps(self.as_dict())


TABLES: dict[str, type[Any]] = {
    "training": Training,
    "holdout": Holdout,
    "evaluation": Evaluation,
    "trouble": Trouble,
}


def _without_none(value: Any) -> Any:
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def from_dict(values: Mapping[str, Any]) -> Experiment:
    """An experiment from plain values, every one of them checked."""
    plain = dict(values)
    fields = {f.name for f in dataclasses.fields(Experiment)}
    for key in plain:
        if key not in fields:
            raise unknown("setting", key, fields)
    for name in ("method", *TABLES):
        if not isinstance(plain.get(name, {}), Mapping):
            raise Mistake(f"{name} is a table of settings; write {name}.key = value, got {plain[name]!r}.")
    method = dict(plain.pop("method", {"name": "fedavg"}))
    name = str(method.pop("name", "fedavg"))
    made: dict[str, Any] = {"method": build(choose("method", name, REGISTRY), method, f"method {name}")}
    for key, kind in TABLES.items():
        made[key] = build(kind, plain.pop(key, {}), key)
    made["clients_per_round"] = plain.pop("clients_per_round", "all")
    top = build(_Top, plain, "the experiment")
    experiment = Experiment(**made, **dataclasses.asdict(top))
    experiment.trouble.faults()
    return experiment


@dataclass(frozen=True)
class _Top:
    """The settings of an experiment that are single values."""

    data: str = "digits"
    split: str = Experiment.split
    model: str = "auto"
    head: str = ""
    rounds: Count = Experiment.rounds
    seed: Natural = 0
    step: Literal["fast", "plain"] = "fast"
    public: str = ""


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise Mistake(f"{path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Mistake(f"{path} is not valid TOML: {error}.") from None


@dataclass(frozen=True)
class Setting:
    """An experiment put together: data loaded and dealt, the model chosen."""

    world: World
    data: DataSet
    deal: Deal
    members: tuple[int, ...]  # clients that may train
    newcomers: tuple[int, ...]  # clients that never do
    judged: tuple[int, ...]  # clients whose own test part is evaluated
    cohort: Callable[[int], list[int]]
    cohort_size: int
    quorum: int


def part_of(value: float | str, whole: int, what: str) -> int:
    """A count, or a share below 1, of `whole`; 'all' is all of it."""
    if value == "all":
        return whole
    try:
        number = float(value)
    except ValueError:
        raise Mistake(f"{what}={value!r} will not do: give a count, a share below 1, or all.") from None
    if 0 < number < 1 or (number == 1 and isinstance(value, float)) or value == "1.0":
        return max(1, int(number * whole))
    if number != int(number) or not 1 <= number <= whole:
        raise Mistake(f"{what}={value} will not do: there are {whole} clients; give 1 to {whole}, or a share below 1.")
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
        raise Mistake(f"model '{experiment.model}' has more than one part; name one model.")
    name, options = steps[0][0], cast(dict[str, Any], steps[0][1])
    fast = experiment.step == "fast"
    make = partial(build_net, name, data.shape, data.classes, seed=experiment.seed, fast=fast, **options)
    make()
    return make


def on_validation(world: World) -> World:
    """The world whose test parts are the validation parts, with no test set beside them: what tuning may look at."""
    if not len(world.validation.values):
        raise Mistake("evaluation.part=validation needs validation data: give holdout.validation a share, such as 0.2.")
    return dataclasses.replace(world, test=world.validation, x_test=world.x_test[:0], y_test=world.y_test[:0])


def public_data(experiment: Experiment, folder: Path | None) -> DataSet:
    if experiment.public == experiment.data:
        raise Mistake(
            "the public set is the clients' own data set: cut from it what no client gets, "
            f"with the split public:per_class=20+{experiment.split}."
        )
    return load(experiment.public, folder) if isinstance(experiment.public, str) else experiment.public


def assemble(experiment: Experiment, *, data_dir: Path | None = None, device: str = "cpu") -> Setting:
    """Load, deal, choose: everything a run needs, mistakes found before it starts."""
    data = load(experiment.data, data_dir) if isinstance(experiment.data, str) else experiment.data
    if experiment.holdout.pool == "all":
        data = data.pooled()
    dealt = deal(experiment.split, data.y_train, seed=experiment.seed, classes=data.classes, owners=data.owners_train)
    pool = data
    if experiment.public:
        pool, dealt = with_public(data, dealt, public_data(experiment, data_dir))
    if experiment.method.public and not len(dealt.public):
        raise Mistake(
            f"method {experiment.method_name} needs public data on the server: begin the split with "
            f"'public:per_class=20+', as in public:per_class=20+{experiment.split}, or give your own with public=..."
        )
    holdout = experiment.holdout
    parts = portion(dealt, validation=holdout.validation, test=holdout.test, seed=experiment.seed)
    population = len(parts)
    new = newcomers(population, holdout.newcomers, experiment.seed) if holdout.newcomers else ()
    members = tuple(c for c in range(population) if c not in set(new))
    size = part_of(experiment.clients_per_round, len(members), "clients_per_round")
    quorum = part_of(experiment.trouble.quorum, size, "quorum")
    if experiment.method.pooled:
        parts, members, size, quorum = in_one_place(dealt, parts, members), (0,), 1, 1
    world = world_of(experiment, pool, dealt, parts, device)
    if experiment.evaluation.part == "validation":
        world = on_validation(world)
    wanted = experiment.evaluation.clients or population
    judged = draw_cohort(range(population), min(wanted, population), experiment.seed, -1)
    return Setting(
        world=world,
        data=data,
        deal=dealt,
        members=members,
        newcomers=new,
        judged=tuple(judged),
        cohort=partial(draw_cohort, members, size, experiment.seed),
        cohort_size=size,
        quorum=quorum,
    )


def world_of(experiment: Experiment, data: DataSet, dealt: Deal, parts: Sequence[Parts], device: str) -> World:
    """The experiment's method, net and training over these data, dealt so."""
    return make_world(
        data,
        dealt,
        parts,
        method=experiment.method,
        training=experiment.training,
        make_net=net_maker(experiment, data),
        seed=experiment.seed,
        rounds=len(experiment.method.stages(experiment.rounds)),
        fast=experiment.step == "fast",
        device=device,
    )


def in_one_place(dealt: Deal, parts: Sequence[Parts], members: Sequence[int]) -> tuple[Parts, ...]:
    """The first client holds what all members would train on; everybody keeps the samples to be judged by."""
    if dealt.noise or dealt.rotation:
        raise Mistake("central cannot pool clients whose inputs differ: leave noise and rotate out of the split.")
    every = np.concatenate([parts[c].train for c in members])
    return tuple(replace(own, train=every if c == 0 else every[:0]) for c, own in enumerate(parts))
