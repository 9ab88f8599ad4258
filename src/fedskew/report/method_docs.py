"""What each method is, read from its file: paper, settings with whose defaults they are, costs. `fedskew methods` and
docs/methods.md are both made from it (`python -m fedskew.report.method_docs`)."""

from __future__ import annotations

import dataclasses
import inspect
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fedskew.core.method import Method
from fedskew.experiment.costs import Costs, Sizes, extra_bytes, measure_costs
from fedskew.methods import REGISTRY
from fedskew.methods.fedavg import FedAvg

MODEL, SHAPE, CLASSES = "simple-cnn", (1, 28, 28), 10  # what the bytes are stated for
# how long the server works does not change what travels: as little as there is
SHORT: dict[str, dict[str, Any]] = {
    "fedpg": {"iterations": 0},
    "fedgen": {"iterations": 1},
    "ccvr": {"epochs": 1},
    "feddf": {"steps": 1},
    "fedic": {"steps": 1, "distil_steps": 1},
    "creff": {"match": 1, "epochs": 1},
    "fedddc": {"I": 1, "J": 1},
}
SETTING = re.compile(r"^    (\w+): .*?  # (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    name: str
    title: str
    reference: str  # authors, venue, arXiv; empty for a control
    text: str  # the file's own words: equations and departures
    settings: dict[str, tuple[Any, str]]  # name -> (default, whose it is)
    down: int  # bytes a client and round beyond FedAvg's
    up: int
    keeps: Sizes  # at each client, by group
    server: int  # bytes at the server beyond FedAvg's
    once: dict[str, int]  # bytes up of rounds of another kind, by name
    has_global: bool
    has_personal: bool
    public: bool

    @property
    def models(self) -> str:
        words = {"global": self.has_global, "personal": self.has_personal}
        return " + ".join(word for word, has in words.items() if has)


def entry(name: str) -> Entry:
    kind = REGISTRY[name]
    title, _, rest = (inspect.getdoc(inspect.getmodule(kind)) or "").partition("\n\n")
    reference, _, text = rest.partition("\n\n")
    if not re.search(r"\b20\d\d\b|University", reference):  # no paper: all of it is explanation
        reference, text = "", rest
    whose = dict(SETTING.findall(inspect.getsource(kind)))
    costs, plain = measure_costs(kind(**SHORT.get(name, {})), MODEL, SHAPE, CLASSES), fedavg()
    return Entry(
        name=name,
        title=" ".join(title.split()),
        reference=" ".join(reference.split()),
        text=text,
        settings={f.name: (f.default, whose.get(f.name, "")) for f in dataclasses.fields(kind)},
        down=extra_bytes(costs.down, plain.down),
        up=extra_bytes(costs.up, plain.up),
        keeps=costs.client,
        server=extra_bytes(costs.server, plain.server),
        once={stage: sum(up.values()) for stage, (_, up) in costs.once.items()},
        has_global=kind.has_global,
        has_personal=bool(kind.personal) or kind.personalise is not Method.personalise or "parameters" in costs.client,
        public=kind.public,
    )


@lru_cache(maxsize=1)
def fedavg() -> Costs:
    return measure_costs(FedAvg(), MODEL, SHAPE, CLASSES)


def numbers(count: int) -> str:
    """Signed, with a space between thousands; a dash for none."""
    return f"{count:+,}".replace(",", " ") if count else "-"


def row(one: Entry) -> list[str]:
    """One line of the overview: name, title, bytes down and up, what clients keep, models, public data."""
    up = numbers(one.up) + "".join(f", {numbers(size)} once" for size in one.once.values())
    keeps = numbers(sum(one.keeps.values())).lstrip("+")
    return [one.name, one.title, numbers(one.down), up, keeps, one.models, "yes" if one.public else "-"]


COLUMNS = ["name", "paper", "down", "up", "a client keeps", "models", "public data"]


def footnote() -> str:
    plain = sum(fedavg().up.values())
    return (
        f"Bytes a client and round beyond FedAvg's {plain:,}".replace(",", " ")
        + f" each way, for {MODEL} on images of {' x '.join(map(str, SHAPE))} and {CLASSES} classes, with the defaults."
    )


def details(one: Entry) -> list[str]:
    """A method in full, as lines."""
    lines = [one.title, *([one.reference] if one.reference else []), "", *one.text.rstrip().splitlines(), ""]
    if one.settings:
        lines += ["Settings:", *(f"  {name} = {value!r}   {whose}" for name, (value, whose) in one.settings.items())]
    for group, size in one.keeps.items():
        lines.append(f"A client keeps {group}: {numbers(size).lstrip('+')} bytes.")
    return lines


def page() -> str:
    """docs/methods.md."""
    entries = [entry(name) for name in REGISTRY]
    rule = "|" + "---|" * len(COLUMNS)
    lines = [
        "# Methods",
        "",
        "Made from the methods' own files by `make docs`; do not edit.",
        "",
        "|" + "|".join(COLUMNS) + "|",
        rule,
        *("|" + "|".join([f"[{one.name}](#{one.name})", *row(one)[1:]]) + "|" for one in entries),
        "",
        footnote(),
    ]
    for one in entries:
        lines += ["", f"## {one.name}", "", f"**{one.title}**  ", one.reference, "", "```", one.text.rstrip(), "```"]
        if one.settings:
            lines += ["", "|setting|default|whose|", "|---|---|---|"]
            lines += [f"|{name}|`{value!r}`|{whose}|" for name, (value, whose) in one.settings.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
