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
from fedskew.core.settings import UsageError, build, checked, unknown
from fedskew.core.training import Count, Natural, NotNegative, Rounds, Share, Training
from fedskew.data.dataset import DataSet
from fedskew.experiment.given import as_method, check_data, check_model, method_from, method_table
from fedskew.experiment.given import method_of as method_of
from fedskew.federation.private import Privacy
from fedskew.federation.robust import Robust
from fedskew.federation.simulate.faults import Fault, parse_faults
from fedskew.methods._find import name_of
from fedskew.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Holdout:
    """Samples that are not trained on, and clients that never train. Shares are between 0 and 1.

    test: share of each client's samples that become its test samples; 0: clients have none.
    validation: share of each client's samples that become its validation samples, for tuning; 0: none.
    newcomers: clients that never train and are evaluated as a group of their own: a count, or a share below 1; 0: none.
    pool: the samples that are split among clients: "train" is the data set's training part, "all" its training and test
        parts together (the server has no test set then).
    """

    test: Share = 0.2
    validation: Share = 0.0
    newcomers: int | float = 0
    pool: Literal["train", "all"] = "train"


@dataclass(frozen=True)
class Evaluation:
    """When and on what the model is evaluated.

    every: rounds between evaluations; the last round is always evaluated. "auto": every round if all evaluations of
        the run together are small, else as many rounds as keep evaluation to about a tenth of the work, in samples.
    clients: how many clients are evaluated on their own test samples, the same ones each time; 0: all.
    part: the samples to evaluate on: "validation" uses the validation samples in place of all test samples.
    diagnose: also compute `Result.diagnostics` at the end: how far features collapsed and client heads drifted apart.
    metric: a figure of your own, a function in a file: "my.py:name" (see experiment/own_metric.py); "": none.
    """

    every: Count | Literal["auto"] = "auto"
    clients: Natural = 0
    part: Literal["test", "validation"] = "test"
    diagnose: bool = False
    metric: str = ""


@dataclass(frozen=True)
class Trouble:
    """Simulated faults of clients, and how many updates a round needs.

    dropout: probability that a client of the cohort does not answer; one client always does. 0: all answer.
    fault: further faults in text form, such as "nan:rate=0.1+die:client=3,round=2" (see simulate/faults.py); "": none.
    quorum: usable updates a round needs: a count, or a share of the cohort below 1. With fewer the run stops.
    """

    dropout: Share = 0.0
    fault: str = ""
    quorum: int | float = 1

    def faults(self) -> tuple[Fault, ...]:
        """The faults to simulate, `dropout` included."""
        drop = (Fault("drop", self.dropout),) if self.dropout else ()
        return drop + parse_faults(self.fault)


@dataclass(frozen=True)
class Stop:
    """When a run ends before its last round, by figures on validation data. The test set is never looked at.

    patience: evaluations without a better value after which the run ends; 0: it never ends early.
    figure: what has to improve: accuracy, balanced, f1, loss, ... (see evaluation/figures.py); "": accuracy, or
        balanced accuracy if the validation samples are not balanced.
    min_delta: by how much a value must be better than the best so far, in the unit that is printed: points of percent.
    """

    patience: Natural = 0
    figure: str = ""
    min_delta: NotNegative = 0.0


@dataclass(frozen=True)
class Experiment:
    """All settings of an experiment. With the same settings, packages and machine, results are bit-identical.

    method: the method with its own settings, such as `FedProx(mu=0.1)`; text is read, too: "fedprox:mu=0.1".
    data: the data set: a name, a path, or a `DataSet` (`from_dataset` makes one of any torch data set).
    split: how the samples are split among clients, in text form; steps are joined by "+".
    model: the net: a name with options in text form, or a torch module; "auto" chooses one for the data.
    head: the name of the last layer of `model` if that is a torch module.
    rounds: training rounds; some methods add rounds of another kind.
    clients_per_round: clients asked to train in a round: a count, a share below 1, or "all".
    seed: seed of every random draw: the split, the initial model, cohorts, batches, faults.
    training: local training of the clients: optimiser, learning rate, epochs, batch size, ... (see `Training`).
    holdout: test samples, validation samples and clients that never train (see `Holdout`).
    evaluation: when and on what the model is evaluated (see `Evaluation`).
    trouble: simulated faults of clients, and how many updates a round needs (see `Trouble`).
    robust: aggregation that withstands hostile clients (see `Robust`).
    privacy: what may leave a site, and differential privacy of clients (see `Privacy`).
    stop: early stopping by validation data (see `Stop`).
    on_divergence: what to do with a run whose loss is not finite, or that falls back to chance (see
        federation/divergence.py): "stop" ends it there, "warn" goes on while updates are usable.
    step: "fast": layers and optimisers of fedskew; "plain": those of torch, as a reference.
    public: public data on the server: a name, a path, or a `DataSet`; "": none, or as the split says
        (public:per_class=20+...).

    A value that does not fit raises `UsageError`.

    >>> from fedskew.methods.fedprox import FedProx
    >>> experiment = Experiment(method=FedProx(mu=0.1), rounds=5, clients_per_round=0.5)
    >>> experiment.to_toml().splitlines()[:3]
    ['data = "digits"', 'split = "dirichlet:alpha=0.3,clients=10"', 'model = "auto"']
    >>> from_dict(tomllib.loads(experiment.to_toml())) == experiment
    True
    """

    method: Method = field(default_factory=FedAvg)
    data: str | DataSet = "digits"
    split: str = "dirichlet:alpha=0.3,clients=10"
    model: str | nn.Module = "auto"
    head: str = ""
    rounds: Rounds = 30
    clients_per_round: int | float | Literal["all"] = "all"
    seed: Natural = 0
    training: Training = field(default_factory=Training)
    holdout: Holdout = field(default_factory=Holdout)
    evaluation: Evaluation = field(default_factory=Evaluation)
    trouble: Trouble = field(default_factory=Trouble)
    robust: Robust = field(default_factory=Robust)
    privacy: Privacy = field(default_factory=Privacy)
    on_divergence: Literal["stop", "warn"] = "stop"
    stop: Stop = field(default_factory=Stop)
    step: Literal["fast", "plain"] = "fast"
    public: str | DataSet = ""

    def __post_init__(self) -> None:
        values: dict[str, Any] = {"method": as_method(self.method)}
        for name, kind in TABLES.items():
            given = getattr(self, name)
            if not isinstance(given, kind):
                raise UsageError(f"{name}={given!r} is invalid: expected a fedskew.{kind.__name__}(...).")
            values[name] = checked(given, name)
        for name in ("data", "public"):
            check_data(name, getattr(self, name))
        check_model(self.model)
        names = {f.name for f in dataclasses.fields(_single_values())}
        plain = {name: getattr(self, name) for name in names}
        objects = {name: value for name, value in plain.items() if isinstance(value, DataSet | nn.Module)}
        values |= vars(checked(_single_values()(**plain | dict.fromkeys(objects, "")), "the experiment")) | objects
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self.trouble.faults()

    @property
    def method_name(self) -> str:
        """The name of the method: in the registry or an installed package, or `my.py:Name`; else its class's name."""
        return name_of(type(self.method))

    def as_dict(self) -> dict[str, Any]:
        """The settings as plain values, as in TOML.

        What changes nothing (an empty `public`, `stop`, `robust` or `privacy`, on_divergence = "stop",
        training.precision = "float32") and None are left out.
        """
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain["data"] = self.data if isinstance(self.data, str) else self.data.name
        plain["model"] = self.model if isinstance(self.model, str) else type(self.model).__name__
        plain["public"] = self.public if isinstance(self.public, str) else self.public.name
        if not plain["public"]:
            del plain["public"]
        if self.on_divergence == "stop":  # changes no figure of a run that does not diverge
            del plain["on_divergence"]
        if self.robust == Robust():
            del plain["robust"]
        if self.privacy == Privacy():
            del plain["privacy"]
        plain["method"] = {"name": self.method_name, **dataclasses.asdict(self.method)}
        if self.stop == Stop():
            del plain["stop"]
        for name in TABLES.keys() & plain.keys():
            plain[name] = dataclasses.asdict(plain[name])
        if not self.evaluation.metric:
            del plain["evaluation"]["metric"]
        if self.training.precision == "float32":
            del plain["training"]["precision"]
        return {key: _without_none(value) for key, value in plain.items()}

    def to_toml(self) -> str:
        """The settings as TOML text; `from_dict` reads it back."""
        return tomli_w.dumps(self.as_dict())


TABLES: dict[str, type[Any]] = {
    "training": Training,
    "holdout": Holdout,
    "evaluation": Evaluation,
    "trouble": Trouble,
    "robust": Robust,
    "privacy": Privacy,
    "stop": Stop,
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
    if isinstance(plain.get("method"), str):
        plain["method"] = method_table(plain["method"])
    for name in ("method", *TABLES):
        if not isinstance(plain.get(name, {}), Mapping):
            raise UsageError(f"{name}={plain[name]!r} is invalid: expected a table of settings, {name}.key = value.")
    made: dict[str, Any] = {"method": method_from(plain.pop("method", {}))}
    for key, kind in TABLES.items():
        made[key] = build(kind, plain.pop(key, {}), key)
    # checked by `assemble`, which knows the number of clients
    made["clients_per_round"] = plain.pop("clients_per_round", Experiment.clients_per_round)
    return Experiment(**made, **vars(build(_single_values(), plain, "the experiment")))


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
