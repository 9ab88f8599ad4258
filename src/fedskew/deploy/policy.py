"""What a site does for a server: which experiments it serves, and how much it computes for one request.

A server is another organisation's machine. Whatever it asks, a site trains only within these limits, on the data that
its operator named, with methods that are installed at the site.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from fedskew.core.files import write_atomically
from fedskew.core.settings import UsageError, build
from fedskew.core.text import clean
from fedskew.core.training import Count, Natural, NotNegative, Positive
from fedskew.core.user_code import split_text
from fedskew.data.dataset import DataSet
from fedskew.experiment.config import Experiment, from_dict, read_toml
from fedskew.experiment.nets import net_maker
from fedskew.federation.private import check_shortening
from fedskew.federation.wire import Layout
from fedskew.methods._find import find_method
from fedskew.methods.fedavg import FedAvg

ACCEPTED = "accepted.json"  # in the site's folder of states
DEEPEST, MOST_SETTINGS = 4, 1000  # of the settings in a request
LARGEST_NUMBER = 100_000  # in a model, a split or a method: widths, depths, numbers of clients or samples


class Refusal(UsageError):
    """Why a site refuses a request, in words that may be told to the server: no paths, nothing about the data."""


@dataclass(frozen=True)
class Policy:
    """The limits of a site.

    methods: names of the methods it serves; empty: any that is installed.
    models: nets in files of this site (my.py:net) that an experiment may name; installed nets need no permission.
    experiments: fingerprints of the experiments it serves, beside those it accepted before. If both this and `methods`
        are empty, the first experiment that a server asks for is accepted, and no other one.
    seconds: the longest time for one request; 0: no limit.
    epochs, steps, rounds: the largest values of these settings.
    parameters: the largest net.
    groups: groups of tensors that may leave, such as "parameters" and "prototypes" (see docs/methods.md); empty: any.
    min_count: the least `privacy.min_count` of an experiment that sends class statistics.
    clip: largest norm of an update that leaves, all groups together; a longer one is shortened here, whatever the
        experiment does. Updates that cannot be (class statistics, batch-norm statistics) are refused. None: no bound.
    metrics: names of the training figures that may leave, such as "loss"; None: all.
    counts: whether counts of right and wrong predictions on the test samples, by class, may leave.
    profile: whether the numbers of training samples by class may leave, if a server asks for them.
    memory: the most memory that `fedskew join` may use, in MB (Linux only); 0: no limit.
    """

    methods: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()
    experiments: frozenset[str] = frozenset()
    seconds: NotNegative = 3600.0
    epochs: Count = 1000
    steps: Count = 1_000_000
    rounds: Count = 100_000
    parameters: Count = 500_000_000
    groups: frozenset[str] = frozenset()
    min_count: Count = 1
    clip: Positive | None = None
    metrics: frozenset[str] | None = None
    counts: bool = True
    profile: bool = False
    memory: Natural = 0

    def check(self, experiment: Experiment) -> None:
        """Raise `Refusal` if an experiment is beyond the limits, apart from its net (see `check_net`)."""
        method = experiment.method_name
        if self.methods and method not in self.methods:
            raise Refusal(f"this site serves only the methods {', '.join(sorted(self.methods))}, not {method}")
        training = experiment.training
        for name, value, most in (
            ("rounds", experiment.rounds, self.rounds),
            ("training.epochs", training.epochs, self.epochs),
            ("training.steps", training.steps or 0, self.steps),
            *self._method_options(experiment),
        ):
            if value > most:
                raise Refusal(f"{name}={value} is more than the {most} that this site allows")
        if (least := experiment.privacy.min_count or 1) < self.min_count:
            raise Refusal(f"privacy.min_count={least} is less than the {self.min_count} that this site requires")
        for name, text in (("model", experiment.model), ("split", experiment.split)):
            if any(len(n) > 6 or int(n) > LARGEST_NUMBER for n in re.findall(r"\d{5,}", str(text))):
                raise Refusal(f"{name} has a number above {LARGEST_NUMBER}, the most that this site allows")

    def _method_options(self, experiment: Experiment) -> Iterator[tuple[str, int, int]]:
        """(name, value, most) of the method's whole numbers: samples to draw, widths, epochs of its own."""
        for entry in fields(experiment.method):
            value = getattr(experiment.method, entry.name)
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, int) and "seed" not in entry.name:
                    yield f"method.{entry.name}", number, self.epochs if "epochs" in entry.name else LARGEST_NUMBER

    def check_layout(self, layout: Layout) -> None:
        """Raise `Refusal` if updates of this layout may not leave, or cannot be shortened to `clip`."""
        self.check_groups(group for group, *_ in layout)
        if self.clip is not None:
            try:
                check_shortening(layout)
            except UsageError as error:
                raise Refusal(f"this site bounds updates to the norm {self.clip:g}, but {error}") from None

    def check_groups(self, groups: Iterable[str]) -> None:
        """Raise `Refusal` if an update has a group of tensors that may not leave."""
        if self.groups and (others := sorted(set(groups) - self.groups)):
            raise Refusal(
                f"updates have {', '.join(others)}; from this site only {', '.join(sorted(self.groups))} leave"
            )

    def check_net(self, experiment: Experiment, data: DataSet) -> None:
        """Raise `Refusal` if the net is too large. It is built without memory for its parameters (device meta)."""
        with torch.device("meta"):
            net = net_maker(replace(experiment, method=FedAvg()), data)()  # a method may replace the head, no more
        size = sum(tensor.numel() for tensor in net.parameters())
        if size > self.parameters:
            raise Refusal(f"the net has {size} parameters, more than the {self.parameters} that this site allows")


def read_policy(path: Path) -> Policy:
    """The policy in a TOML file, whose keys are the fields of `Policy`; UsageError if it is not one."""
    policy = build(Policy, read_toml(path), f"the policy {path}")
    for name in policy.methods:
        if split_text(name) is None:
            find_method(name)
    return policy


def parse_allowed(texts: Sequence[str]) -> Policy:
    """The policy of `--allow method=fedavg,fedcrc` or `--allow model=my.py:net`.

    UsageError if a method is not installed, or a file cannot be used.
    """
    allowed: dict[str, set[str]] = {"method": set(), "model": set()}
    for text in texts:
        key, equals, values = (part.strip() for part in text.partition("="))
        if key not in allowed or not equals:
            raise UsageError(f"--allow {text} is invalid: expected method=NAME,... or model=NAME,...")
        for name in filter(None, (value.strip() for value in values.split(","))):
            if key == "method":
                find_method(name)
            allowed[key].add(name)
    return Policy(methods=frozenset(allowed["method"]), models=frozenset(allowed["model"]))


def join_policy(
    file: Path | None,
    allow: Sequence[str],
    accept: Sequence[str],
    seconds: float | None,
    profile: bool = False,
) -> Policy:
    """The policy of `fedskew join`: a file, to which --allow, --accept and --allow-profile (`profile`) add.

    --max-seconds takes precedence over the file.
    """
    policy, more = read_policy(file) if file is not None else Policy(), parse_allowed(allow)
    return replace(
        policy,
        methods=policy.methods | more.methods,
        models=policy.models | more.models,
        experiments=policy.experiments | frozenset(accept),
        seconds=policy.seconds if seconds is None else seconds,
        profile=policy.profile or profile,
    )


def fingerprint(settings: Mapping[str, Any]) -> str:
    """Identifies an experiment: 16 hexadecimal digits of the SHA-256 of its settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def read_experiment(settings: Mapping[str, Any], policy: Policy) -> Experiment:
    """The experiment in a request; Refusal if its settings are invalid, nested too deeply or too many.

    A method, net or metric in a file is code of this machine that the server names: only what the policy has is used.
    """
    left: list[Any] = [settings]
    level = count = 0
    while left:
        count, level = count + len(left), level + 1
        if level > DEEPEST or count > MOST_SETTINGS:
            raise Refusal(f"the settings are nested deeper than {DEEPEST}, or more than {MOST_SETTINGS}")
        if any(_names_foreign_code(text, policy) for text in left if isinstance(text, str)):
            raise Refusal("the experiment names code in a file, which this site's operator has not allowed")
        left = [v for value in left if isinstance(value, dict | list) for v in _items(value)]
    try:
        return from_dict(settings)
    except ValueError as error:
        raise Refusal(clean(error).removesuffix(".")) from None


def _names_foreign_code(text: str, policy: Policy) -> bool:
    """Whether a setting could make this site import a file that its operator did not name."""
    return ".py" in text and (split_text(text) or (text, ""))[0] not in policy.methods | policy.models


def _items(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else list(value)


class Consent:
    """The experiments that a site serves, by fingerprint, in the folder of its states: each is asked for once."""

    def __init__(self, policy: Policy, folder: Path) -> None:
        self.policy, self.path = policy, folder / ACCEPTED

    def accepted(self) -> dict[str, str]:
        """Fingerprint -> what the experiment is."""
        try:
            found = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError:
            raise Refusal("its list of accepted experiments is damaged; its operator has to remove it") from None
        return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}

    def check(self, settings: Mapping[str, Any], experiment: Experiment) -> str:
        """Raise `Refusal` unless this experiment is served; returns a line for the operator, "" if it was known."""
        self.policy.check(experiment)
        mark, accepted = fingerprint(settings), self.accepted()
        if mark in accepted:
            return ""
        what = f"{experiment.method_name}, {experiment.rounds} rounds, model {experiment.model}"
        what = clean(f"{what}, {experiment.training.epochs} epochs, seed {experiment.seed}", 120)
        first = not accepted and not self.policy.experiments
        if not (self.policy.methods or mark in self.policy.experiments or first):
            raise Refusal(
                f"this site has not agreed to this experiment ({mark}: {what}); "
                f"its operator can agree with `fedskew join --accept {mark}`"
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(accepted | {mark: what}, indent=1).encode())
        return f"serves experiment {mark}: {what}"


def with_stand_in(experiment: Experiment, data: DataSet) -> Experiment:
    """The experiment on `data`. A site loads no public data set: one of its own samples stands for it, never used."""
    if not experiment.public:
        return replace(experiment, data=data)
    one = replace(
        data, name="(public)", x_train=data.x_train[:1], y_train=data.y_train[:1], x_test=data.x_test[:0],
        y_test=data.y_test[:0], owners_train=None, owners_test=None,
    )  # fmt: skip
    return replace(experiment, data=data, public=one)
