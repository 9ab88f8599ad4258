"""Which methods are raced: those that a user's limits allow, first those that led on the board's nearest tasks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from fedskew.core.method import Method
from fedskew.core.net import Shape
from fedskew.core.settings import UsageError
from fedskew.evaluation.figures import bytes_text
from fedskew.experiment.config import method_of
from fedskew.experiment.costs import Costs, measure_costs
from fedskew.experiment.given import method_text
from fedskew.methods import REGISTRY
from fedskew.methods.fedavg import FedAvg
from fedskew.studies.advise.goal import Goal
from fedskew.studies.board.evidence import Row, Task
from fedskew.studies.compare import distinct

ALWAYS = ("fedavg", "fedavgm", "finetune", "local")  # what any method must beat, if the limits allow them
# raced if the board has no task: the five methods that fedskew was written for, and well-known ones of each kind
# (a pull to the global model, control variates, dynamic regularisation, personal heads, personal models)
GENERAL = ("fedmr", "fedcrc", "fedcd", "fedprox", "scaffold", "feddyn", "fedrod", "fedrep", "ditto", "fedddc", "fedpg")
LEAST = 8  # methods besides ALWAYS; if the board gives fewer, GENERAL fills up
NEAREST, PER_TASK = 2, 6  # tasks of the board, and methods taken from each
# From here on a task's skew is another one, and its leaders say nothing about these data. The board's tasks with three
# seeds each: the same task with another seed is at most 0.07 away, another task at least 0.12.
FAR = 0.10
# figures in which tasks are compared, each brought to about 0 to 1
SCALES: Mapping[str, Callable[[float], float]] = {
    "total_variation": float,
    "empty_cells": float,
    "size_gini": float,
    "imbalance_factor": lambda factor: math.log10(max(factor, 1)) / 2,
    "features": float,
    "clients": lambda count: math.log10(max(count, 1)) / 3,
}


@dataclass(frozen=True)
class Limits:
    """What a method may not need. The defaults forbid nothing.

    public: whether the server may have public data. state: whether clients may keep anything between rounds.
    sums_only: whether the server may see only sums over clients. max_bytes: bytes that one client may send and receive
    in a round together; None: any.
    """

    public: bool = True
    state: bool = True
    sums_only: bool = False
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.max_bytes is not None and self.max_bytes < 1:
            raise UsageError(f"max_bytes={self.max_bytes} is invalid: expected a number of bytes of at least 1.")

    @property
    def need_costs(self) -> bool:
        """Whether a method's costs must be measured to check them."""
        return not self.state or self.max_bytes is not None

    def forbids(self, method: Method, costs: Costs | None) -> str:
        """Why a method is not allowed, in words that follow its name; "" if it is. `costs` as in `need_costs`."""
        if method.public and not self.public:
            return "needs public data on the server"
        if self.sums_only and not method.sums_only:
            return "needs each client's own tensors, not only sums"
        if costs is None:
            return ""
        kept, sent = sum(costs.client.values()), sum(costs.up.values()) + sum(costs.down.values())
        if kept and not self.state:
            return f"keeps {bytes_text(kept)} at each client between rounds"
        if self.max_bytes is not None and sent > self.max_bytes:
            return f"sends and receives {bytes_text(sent)} a client and round, more than {bytes_text(self.max_bytes)}"
        return ""


class Neighbour(msgspec.Struct, frozen=True, kw_only=True):
    """A task of the board, and its methods that led there."""

    task: str
    title: str
    distance: float  # root mean square difference of the skew figures, each about 0 to 1; 0: the same
    goal: str  # key of the figure that its methods are ordered by here
    rows: list[Row]


class Shortlist(msgspec.Struct, frozen=True, kw_only=True):
    """What is raced, and why."""

    methods: dict[str, str]  # text form -> why it is raced
    excluded: dict[str, str] = {}  # name -> why it is not
    nearest: list[Neighbour] = []
    note: str = ""  # where the list comes from, in a sentence


def make_shortlist(
    skew: Mapping[str, float | None],
    goal: Goal,
    limits: Limits,
    tasks: Sequence[Task],
    *,
    public: int,
    net: tuple[Callable[[], Any], Shape, int],
    given: Sequence[str] = (),
) -> Shortlist:
    """The methods to race on clients with these skew figures.

    tasks: the board's evidence, of which those count whose FedAvg has converged; none: a list of general methods is
    taken. public: samples on the server.
    net: how to build the net, the shape of a sample and the number of classes, to measure costs with.
    given: the user's own choice of methods, in place of the board's.
    """
    known = nearest(skew, [task for task in tasks if task.ranked], goal)[:NEAREST]
    near = [n for n in known if n.distance < FAR]
    wanted = dict.fromkeys(ALWAYS, "always raced")
    if given:
        note = "The methods were given, not chosen by fedskew."
        wanted |= {text: "given" for text in given if method_text(method_of(text)) not in ALWAYS}
    elif near:
        titles = " and ".join(f"{n.task} ({n.title}, distance {n.distance:.2f})" for n in near)
        note = f"The nearest tasks of the board are {titles}."
        for n in near:
            wanted |= {row.method: f"led on {n.task}" for row in n.rows if row.method not in wanted}
    elif known:
        note = (
            f"The board has no task like these data (the nearest is {known[0].task}, {known[0].title}, distance "
            f"{known[0].distance:.2f}): the list is a general one, the same for any skew."
        )
    else:
        note = "The board has no evidence yet: the list is a general one, the same for any skew."
    if not given:
        missing = max(0, LEAST - (len(wanted) - len(ALWAYS))) if near else len(GENERAL)
        names = {text.partition(":")[0] for text in wanted}
        wanted |= dict.fromkeys([n for n in GENERAL if n not in names][:missing], "general")
    allowed, excluded = {}, {}
    for text in distinct(list(wanted)):
        method = method_of(text)
        if why := _unusable(method, goal, limits, public, net):
            excluded[text] = why
        else:
            allowed[text] = wanted[text]
    return Shortlist(methods=allowed, excluded=excluded, nearest=near, note=note)


def _unusable(
    method: Method, goal: Goal, limits: Limits, public: int, net: tuple[Callable[[], Any], Shape, int]
) -> str:
    """Why a method cannot be raced here; "" if it can."""
    if method.pooled:
        return "pools the clients' data: a control, not federated"
    if not goal.fits(method):
        return "has no global model"
    if goal.model == "global" and method.terms_off == {} and not isinstance(method, FedAvg):
        return "has FedAvg's global model"
    if why := limits.forbids(method, None):
        return why
    if method.public and not public:
        return "needs public data on the server, and there are none"
    if not limits.need_costs:
        return ""
    try:
        quick = dataclasses.replace(method, **method.quick)
        return limits.forbids(method, measure_costs(quick, *net))
    except UsageError as error:  # the method cannot use this net
        return str(error).rstrip(".")


def nearest(skew: Mapping[str, float | None], tasks: Sequence[Task], goal: Goal) -> list[Neighbour]:
    """The board's tasks, nearest first, each with the methods that lead there by the goal's kind of model.

    A figure that one of the two does not have is left out of their distance.
    """
    found = []
    for task in tasks:
        gaps = [
            scale(ours) - scale(theirs)
            for key, scale in SCALES.items()
            if (ours := skew.get(key)) is not None and (theirs := task.skew.get(key)) is not None
        ]
        distance = math.sqrt(sum(gap * gap for gap in gaps) / len(gaps)) if gaps else math.inf
        key = "personal" if goal.model == "own" else task.goal
        rows = leaders(task, goal)
        found.append(Neighbour(task=task.name, title=task.title, distance=distance, goal=key, rows=rows))
    return sorted(found, key=lambda n: n.distance)


def leaders(task: Task, goal: Goal) -> list[Row]:
    """The methods of a task that can be raced and were best there, best first. Those that diverged are left out.

    They are compared by the clients' own models or by the global model, as the goal says.
    """
    known = [row for row in task.rows if row.method.partition(":")[0] in REGISTRY and not row.failed]
    federated = [row for row in known if not method_of(row.method).pooled and row.method not in ALWAYS]
    found = [(value, row) for row in federated if (value := evidence_of(row, goal.model == "own")[0]) is not None]
    return [row for _, row in sorted(found, key=lambda pair: -pair[0])[:PER_TASK]]


def evidence_of(row: Row, own: bool) -> tuple[float | None, float | None, float | None]:
    """(value, difference to tuned FedAvg, half of its interval): of clients' own models, or of the task's figure."""
    if own:
        return row.figures.get("personal"), row.own_over, row.own_margin
    return row.value, row.over, row.margin
