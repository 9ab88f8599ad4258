"""An experiment: everything that decides a result, as one value, and its TOML form."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tomli_w
from torch import nn

from fedskew.core.method import Method
from fedskew.core.settings import UsageError, build, choose, parse, unknown
from fedskew.core.training import Count, Natural, Share, Training
from fedskew.data.dataset import DataSet
from fedskew.federation.simulate.faults import Fault, parse_faults
from fedskew.methods import REGISTRY
from fedskew.methods.fedavg import FedAvg


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
            raise UsageError(f"{name} is a table of settings; write {name}.key = value, got {plain[name]!r}.")
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
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}.") from None


def method_of(text: str) -> Method:
    """`fedprox:mu=0.1` -> FedProx(mu=0.1)."""
    steps = parse(text, "method")
    if len(steps) > 1:
        raise UsageError(f"method '{text}' has more than one part; write name:field=value,...")
    name, options = steps[0]
    values: dict[str, Any] = {key: _listed(value) for key, value in options.items()}
    return build(choose("method", name, REGISTRY), values, f"method {name}")


def _listed(value: str) -> Any:
    """5-5-5 is a tuple of numbers, since a comma ends an option."""
    parts = value.split("-")
    return [int(p) for p in parts] if len(parts) > 1 and all(p.isdigit() for p in parts) else value
