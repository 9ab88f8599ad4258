"""An experiment: all settings that determine a result, as one value, and their TOML form."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_type_hints

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
    """Samples that are not trained on, and clients that never train. Shares are between 0 and 1."""

    # share of each client's samples that become its test samples; 0: clients have none
    test: Share = 0.2
    # share of each client's samples that become its validation samples, for tuning; 0: none
    validation: Share = 0.0
    # clients that never train and are evaluated as a group of their own: a count, or a share below 1; 0: none
    newcomers: int | float = 0
    # the samples that are split among clients: the data set's training part, or its training and test parts together
    # ("all"; the server has no test set then)
    pool: Literal["train", "all"] = "train"


@dataclass(frozen=True)
class Evaluation:
    """When and on what the model is evaluated."""

    # rounds between evaluations; the last round is always evaluated. "auto": every round if all evaluations of the run
    # together are small, else as many rounds as keep evaluation to about a tenth of the work, counted in samples
    every: Count | Literal["auto"] = "auto"
    # how many clients are evaluated on their own test samples, the same ones each time; 0: all
    clients: Natural = 0
    # the samples to evaluate on: "validation" uses the validation samples in place of all test samples
    part: Literal["test", "validation"] = "test"
    # also compute `Result.diagnostics` at the end: how far features collapsed and client heads drifted apart
    diagnose: bool = False


@dataclass(frozen=True)
class Trouble:
    """Simulated faults of clients, and how many updates a round needs."""

    # probability that a client of the cohort does not answer; one client always does. 0: all answer
    dropout: Share = 0.0
    # further faults in text form, such as nan:rate=0.1+die:client=3,round=2 (see simulate/faults.py); "": none
    fault: str = ""
    # usable updates a round needs: a count, or a share of the cohort below 1. With fewer the run stops
    quorum: int | float = 1

    def faults(self) -> tuple[Fault, ...]:
        """The faults to simulate, `dropout` included."""
        drop = (Fault("drop", self.dropout),) if self.dropout else ()
        return drop + parse_faults(self.fault)


@dataclass(frozen=True)
class Experiment:
    """All settings of an experiment. With the same settings, packages and machine, results are bit-identical.

    >>> from fedskew.methods.fedprox import FedProx
    >>> experiment = Experiment(method=FedProx(mu=0.1), rounds=5, clients_per_round=0.5)
    >>> experiment.to_toml().splitlines()[:3]
    ['data = "digits"', 'split = "dirichlet:alpha=0.3,clients=10"', 'model = "auto"']
    >>> from_dict(tomllib.loads(experiment.to_toml())) == experiment
    True
    """

    # the method with its own settings
    method: Method = field(default_factory=FedAvg)
    # the data set: a name, a path, or a DataSet
    data: str | DataSet = "digits"
    # how the samples are split among clients, in text form; steps are joined by "+"
    split: str = "dirichlet:alpha=0.3,clients=10"
    # the net: a name with options in text form, or a torch module; "auto" chooses one for the data
    model: str | nn.Module = "auto"
    # the name of the last layer of `model` if that is a torch module
    head: str = ""
    # training rounds; some methods add rounds of another kind
    rounds: Count = 30
    # clients asked to train in a round: a count, a share below 1, or "all"
    clients_per_round: int | float | Literal["all"] = "all"
    # seed of every random draw: the split, the initial model, cohorts, batches, faults
    seed: Natural = 0
    # local training of the clients: optimiser, epochs, batch size, ...
    training: Training = field(default_factory=Training)
    holdout: Holdout = field(default_factory=Holdout)
    evaluation: Evaluation = field(default_factory=Evaluation)
    trouble: Trouble = field(default_factory=Trouble)
    # "fast": layers and optimisers of fedskew; "plain": those of torch, as a reference
    step: Literal["fast", "plain"] = "fast"
    # public data on the server: a name, a path, or a DataSet; "": none, or as the split says (public:per_class=20+...)
    public: str | DataSet = ""

    @property
    def method_name(self) -> str:
        """The name of the method in the registry; the name of its class if it is not there."""
        return next((name for name, kind in REGISTRY.items() if kind is type(self.method)), type(self.method).__name__)

    def as_dict(self) -> dict[str, Any]:
        """The settings as plain values, as in TOML. An empty `public` and settings that are None are left out."""
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
        """The settings as TOML text; `from_dict` reads it back."""
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
    """An experiment from plain values, as in the TOML form. Missing settings have their defaults.

    An unknown name or an invalid value raises UsageError.
    """
    plain = dict(values)
    fields = {f.name for f in dataclasses.fields(Experiment)}
    for key in plain:
        if key not in fields:
            raise unknown("setting", key, fields)
    for name in ("method", *TABLES):
        if not isinstance(plain.get(name, {}), Mapping):
            raise UsageError(f"{name}={plain[name]!r} is invalid: expected a table of settings, {name}.key = value.")
    method = dict(plain.pop("method", {"name": "fedavg"}))
    name = str(method.pop("name", "fedavg"))
    made: dict[str, Any] = {"method": build(choose("method", name, REGISTRY), method, f"method {name}")}
    for key, kind in TABLES.items():
        made[key] = build(kind, plain.pop(key, {}), key)
    # checked by `assemble`, which knows the number of clients
    made["clients_per_round"] = plain.pop("clients_per_round", Experiment.clients_per_round)
    experiment = Experiment(**made, **vars(build(_single_values(), plain, "the experiment")))
    experiment.trouble.faults()
    return experiment


@cache
def _single_values() -> type[Any]:
    """A dataclass of the fields of `Experiment` that are single values in TOML, with the same types and defaults.

    Data sets and models are text there.
    """
    types = get_type_hints(Experiment, include_extras=True) | {"data": str, "model": str, "public": str}
    others = {"method", "clients_per_round", *TABLES}
    fields = [(f.name, types[f.name], f.default) for f in dataclasses.fields(Experiment) if f.name not in others]
    return dataclasses.make_dataclass("SingleValues", fields, frozen=True)


def read_toml(path: Path) -> dict[str, Any]:
    """The contents of a TOML file; UsageError if it cannot be read or is not valid TOML."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}.") from None


def method_of(text: str) -> Method:
    """A method from its text form: `fedprox:mu=0.1` gives FedProx(mu=0.1)."""
    steps = parse(text, "method")
    if len(steps) > 1:
        raise UsageError(f"method '{text}' is invalid: expected one method, as in name:field=value,...")
    name, options = steps[0]
    values: dict[str, Any] = {key: _numbers(value) for key, value in options.items()}
    return build(choose("method", name, REGISTRY), values, f"method {name}")


def _numbers(value: str) -> Any:
    """5-5-5 as a list of numbers, since a comma ends an option; other text unchanged."""
    parts = value.split("-")
    return [int(p) for p in parts] if len(parts) > 1 and all(p.isdigit() for p in parts) else value
