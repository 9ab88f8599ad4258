"""What each method is, as its class declares it: paper, settings, costs.

`fedskew methods` shows it, and so do the pages in docs (`report/method_pages.py`).
"""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fedskew.core.method import Method
from fedskew.experiment.costs import Costs, Sizes, extra_bytes, measure_costs
from fedskew.methods._find import find_method
from fedskew.methods.fedavg import FedAvg
from fedskew.report.leaks import leaks_of, sight

MODEL, SHAPE, CLASSES = "simple-cnn", (1, 28, 28), 10  # what the bytes are stated for


@dataclass(frozen=True)
class Setting:
    """One setting of a method, as its `setting(...)` declares it."""

    default: Any
    help: str
    source: str  # of the default


@dataclass(frozen=True)
class MethodEntry:
    """A method as the listings show it."""

    name: str
    summary: str  # one sentence
    title: str  # of the paper; the first line of the module's docstring
    reference: str  # authors, venue, link; empty for a control
    text: str  # the rest of the module's docstring: equations and departures
    formula: str  # the main equations in LaTeX
    settings: dict[str, Setting]
    down: int  # bytes per client and round, beyond FedAvg's
    up: int
    keeps: Sizes  # bytes that each client keeps between rounds, by group
    server: int  # bytes that the server keeps, beyond FedAvg's
    once: dict[str, int]  # bytes up in rounds of another kind, by stage
    has_global: bool
    has_personal: bool
    public: bool
    sends: list[str]  # groups of an update, those of all stages
    sums_only: bool  # whether the server needs only sums over clients
    weak_where: dict[str, str]  # see Method.weak_where
    meant: list[str]  # conditions on runs that it was made for, each one sentence

    @property
    def models(self) -> str:
        words = {"global": self.has_global, "personal": self.has_personal}
        return " + ".join(word for word, has in words.items() if has)


def entry(name: str) -> MethodEntry:
    """The entry of a registered method. Its costs are measured in two short rounds."""
    kind = find_method(name)
    title, text = docstring(kind)
    costs, plain = measure_costs(kind(**kind.quick), MODEL, SHAPE, CLASSES), fedavg()
    return MethodEntry(
        name=name,
        summary=(inspect.getdoc(kind) or "").partition("\n")[0],
        title=title,
        reference=kind.paper.reference if kind.paper else "",
        text=text,
        formula=kind.formula,
        settings={
            f.name: Setting(f.default, f.metadata.get("help", ""), f.metadata.get("source", ""))
            for f in dataclasses.fields(kind)
        },
        down=extra_bytes(costs.down, plain.down),
        up=extra_bytes(costs.up, plain.up),
        keeps=costs.client,
        server=extra_bytes(costs.server, plain.server),
        once={stage: sum(up.values()) for stage, (_, up) in costs.once.items()},
        has_global=kind.has_global,
        has_personal=bool(kind.personal) or kind.personalise is not Method.personalise or "parameters" in costs.client,
        public=kind.public,
        sends=list(dict.fromkeys([*costs.up, *(group for _, up in costs.once.values() for group in up)])),
        sums_only=kind.sums_only,
        weak_where=dict(kind.weak_where),
        meant=[f"Meant for {each.words}: {each.why}." for each in kind.meant],
    )


def docstring(kind: type[Method]) -> tuple[str, str]:
    """(title, text) of the docstring of a method's module: its first paragraph, and what follows the reference."""
    title, _, rest = (inspect.getdoc(inspect.getmodule(kind)) or "").partition("\n\n")
    text = rest.partition("\n\n")[2] if kind.paper else rest
    return " ".join(title.split()), text.rstrip()


@lru_cache(maxsize=1)
def fedavg() -> Costs:
    """FedAvg's costs, with which the others are compared."""
    return measure_costs(FedAvg(), MODEL, SHAPE, CLASSES)


def numbers(count: int) -> str:
    """A signed number with a space between thousands; a dash for 0."""
    return f"{count:+,}".replace(",", " ") if count else "-"


def row(one: MethodEntry) -> list[str]:
    """The cells of a method in the overview, in the order of COLUMNS."""
    up = numbers(one.up) + "".join(f", {numbers(size)} once" for size in one.once.values())
    keeps = numbers(sum(one.keeps.values())).lstrip("+")
    public, sees = "yes" if one.public else "-", sight(one.sums_only)
    return [one.name, one.summary, numbers(one.down), up, keeps, one.models, public, sees]


COLUMNS = ["name", "what it does", "down", "up", "a client keeps", "models", "public data", "server sees"]


def footnote() -> str:
    """What the numbers in the overview mean."""
    plain = sum(fedavg().up.values())
    return (
        f"Bytes per client and round beyond FedAvg's {plain:,}".replace(",", " ")
        + f" each way, for {MODEL} on images of {' x '.join(map(str, SHAPE))} and {CLASSES} classes, with the defaults."
    )


def details(one: MethodEntry) -> list[str]:
    """A method in full, as lines."""
    lines = [
        one.title,
        *([one.reference] if one.reference else []),
        "",
        one.summary,
        *one.meant,
        "",
        *one.text.splitlines(),
        "",
    ]
    if one.settings:
        lines.append("Settings:")
    for name, setting in one.settings.items():
        lines.append(f"  {name} = {setting.default!r}   {setting.help}".rstrip())
        lines += [f"    default: {setting.source}"] if setting.source else []
    for group, size in one.keeps.items():
        lines.append(f"A client keeps {group}: {numbers(size).lstrip('+')} bytes.")
    lines += ["What leaves a site (to the server):"]
    lines += [f"  {group}: {leak.what}. Can reveal: {leak.reveals}." for group, leak in leaks_of(one.sends).items()]
    return [*lines, f"  {needs(one)}", *weaknesses(one)]


def needs(one: MethodEntry) -> str:
    """One sentence: what the server must see of single clients."""
    if one.sums_only:
        return "The server needs only sums over clients."
    return "The server needs each client's tensors: sums over clients are not enough."


def weaknesses(one: MethodEntry) -> list[str]:
    """Where the method is known to end below FedAvg, or without a global model below training alone; a line each."""
    reference = "FedAvg" if one.has_global else "training alone"
    return [f"Known to end below {reference} ({where}): {why}" for where, why in one.weak_where.items()]
