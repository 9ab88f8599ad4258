"""The answer: which method, how far it is ahead, what cannot be told apart from it, and all that it rests on."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import msgspec

from fedskew.evaluation.figures import Figure
from fedskew.experiment.config import Experiment
from fedskew.studies.advise.budget import Budget
from fedskew.studies.advise.finals import BASELINE, Finals
from fedskew.studies.advise.goal import Goal
from fedskew.studies.advise.profile import Profile
from fedskew.studies.advise.promotion import Fate
from fedskew.studies.advise.race import Race
from fedskew.studies.advise.remarks import (
    is_compared,
    no_better_than_guessing,
    notes,
    open_lead,
    short_sentence,
    too_little,
    unsettled,
    warnings,
)
from fedskew.studies.advise.scoring import Candidate
from fedskew.studies.advise.shortlist import Shortlist
from fedskew.studies.advise.verdict import Verdict, decide, sentence
from fedskew.studies.ranking import FEWEST, Difference, gap_text, rank

IN_FINAL = "in the final"


class Progress(NamedTuple):
    """How far advice is."""

    done: int  # rounds
    total: int  # about how many there will be
    text: str  # what is running
    seconds: float  # that are about left


class Finalist(msgspec.Struct, frozen=True, kw_only=True):
    """One method in the final.

    Differences are to tuned FedAvg with the same seeds; a margin is half the width of the 95 % interval.
    """

    method: str  # with its settings
    lr: float
    seeds: int  # that finished
    validation: float | None  # the goal's figure, mean over seeds
    over: float | None = None  # on validation data
    margin: float | None = None
    test: float | None = None  # on the clients' test parts
    test_over: float | None = None
    test_margin: float | None = None
    shared: float | None = None  # the global model on validation data; None: it has none
    curves: list[list[tuple[int, float]]] = []  # of each seed: (rounds, the figure on validation data)
    failed: str = ""


class RaceRow(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one candidate after one rung."""

    rounds: int
    method: str
    lr: float
    value: float | None  # mean over the race's seeds, on validation data
    kept: bool
    why: str
    p: float | None  # adjusted, of the test against the leader


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What `advise` found.

    >>> [field.name for field in fields(Advice)][:5]
    ['sentence', 'choice', 'lr', 'certain', 'best_global']
    """

    sentence: str  # the answer
    choice: str  # the method to use, with its settings
    lr: float  # its learning rate
    certain: bool  # whether it is told apart from tuned FedAvg; False: the choice is FedAvg
    best_global: str  # the best method if all clients must use one model, in a sentence; "": none has one
    ties: list[str]  # methods that cannot be told apart from the choice
    goal: str  # key of the figure that is judged
    goal_words: str
    finals: list[Finalist]  # best first
    race: list[RaceRow]
    profile: Profile
    shortlist: Shortlist
    left_out: dict[str, str]  # what the budget did not allow, or what failed
    notes: list[str]
    warnings: list[str]
    spent: str  # what it cost, in words
    experiment: Experiment  # the chosen one, ready to run
    command: str = ""  # runs it; "": the data are an object, or nothing was written
    directory: str = ""  # "": nothing was written
    schema: int = 1

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, as in advise.json; `experiment` are its settings."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return dict(msgspec.to_builtins(values | {"experiment": self.experiment.as_dict()}, str_keys=True))


def make_advice(
    given: Experiment,
    goal: Goal,
    profile: Profile,
    shortlist: Shortlist,
    race: Race,
    finals: Finals,
    tested: Mapping[str, Mapping[int, float]],
    budget: Budget,
) -> Advice:
    """The answer, from what was found. The choice rests on validation data; `tested` gives the numbers."""
    baseline = next(c for c in finals.scores if c.name == BASELINE)
    verdict = decide(finals.values(), goal.figure, str(baseline))
    by_name = {str(c): c for c in finals.scores}
    chosen = by_name[verdict.choice]
    alone = next((str(c) for c in finals.scores if c.name == "local"), None)
    names = {text: _shown(c) for text, c in by_name.items()}
    answer, rises = (
        sentence(verdict, tested, goal.figure, str(baseline), names, alone),
        unsettled(finals, goal, profile),
    )
    nothing = no_better_than_guessing(verdict, goal, profile, names) if is_compared(finals) else ""
    if nothing and not finals.short:
        answer, rises = nothing, ""
        verdict = replace(verdict, choice=str(baseline), certain=False)
        chosen = baseline
    elif finals.short and is_compared(finals):
        answer = short_sentence(verdict, finals, goal.figure, str(baseline), names, alone)
        verdict = replace(verdict, choice=str(baseline), certain=False)
        chosen = baseline
    if missing := too_little(finals, budget):
        answer = f"{answer} {missing}"
    if rises and verdict.certain:  # not a note: who reads only the answer must know
        answer, rises = f"{answer} {rises}", ""
    return Advice(
        sentence=answer,
        choice=chosen.method,
        lr=chosen.lr,
        certain=verdict.certain,
        best_global=best_global(finals, goal, str(baseline), names),
        ties=[by_name[text].method for text in verdict.ties],
        goal=goal.figure.key,
        goal_words=goal.words,
        finals=finalist_rows(finals, verdict, tested, goal.figure, str(baseline)),
        race=[race_row(rung.rounds, fate, finals) for rung in race.rungs for fate in rung.fates],
        profile=profile,
        shortlist=shortlist,
        left_out=race.left_out | finals.left_out,
        notes=[
            *notes(race, finals, shortlist),
            *([rises] if rises else []),
            *profile.notes,
            *([] if finals.short else open_lead(verdict, finals, goal.figure, names)),
        ],
        warnings=warnings(finals, chosen),
        spent=f"{budget.text(budget.spent)} of {budget.text(budget.limit)}",
        experiment=chosen.of(given),
    )


def _shown(candidate: Candidate) -> str:
    return f"{candidate.method} with lr {candidate.lr:g}"


def finalist_rows(
    finals: Finals, verdict: Verdict, tested: Mapping[str, Mapping[int, float]], figure: Figure, baseline: str
) -> list[Finalist]:
    """A row for each candidate of the final, best first."""
    by_name = {str(c): c for c in finals.scores}
    test = {s.method: s for s in rank(tested, figure, baseline)}
    shared = finals.values("shared")
    rows = []
    for standing in verdict.standings:
        candidate, on_test = by_name[standing.method], test[standing.method]
        seen = shared[standing.method].values()
        failures = [s.failed for s in finals.scores[candidate].values() if s.failed]
        rows.append(
            Finalist(
                method=candidate.method,
                lr=candidate.lr,
                seeds=len(standing.values),
                validation=standing.mean,
                **_difference(standing.over, ""),
                test=on_test.mean,
                **_difference(on_test.over, "test_"),
                shared=statistics.mean(seen) if seen else None,
                curves=[s.curve for s in finals.scores[candidate].values() if s.curve],
                failed=failures[0] if failures else "",
            )
        )
    return rows


def _difference(over: Difference | None, start: str) -> dict[str, Any]:
    return {} if over is None else {f"{start}over": over.mean, f"{start}margin": over.margin}


def race_row(rounds: int, fate: Fate, finals: Finals) -> RaceRow:
    """A candidate's fate as a row."""
    c = fate.candidate
    last = rounds == next((s.rounds for of in finals.scores.values() for s in of.values()), None)
    why = fate.why if not last or fate.value is None else IN_FINAL if c in finals.scores else f"not {IN_FINAL}"
    return RaceRow(rounds=rounds, method=c.method, lr=c.lr, value=fate.value, kept=fate.kept, why=why, p=fate.p)


def best_global(finals: Finals, goal: Goal, baseline: str, names: Mapping[str, str]) -> str:
    """Which method gives the best single model for all clients, by the same measure on validation data."""
    figure = Goal("global", goal.measure).figure
    values = {name: of for name, of in finals.values("shared").items() if of}
    if finals.short or len(finals.seeds) < FEWEST or baseline not in values:
        return ""
    verdict = decide(values, figure, baseline)
    standing = next(s for s in verdict.standings if s.method == verdict.choice)
    where = "validation parts"
    if not verdict.certain or standing.over is None:
        value = f"{figure.text(standing.mean)} {figure.unit}".strip()
        return f"One model for all clients: none is told apart from tuned FedAvg's, {value} on the {where}."
    gap = gap_text(standing.over, figure)
    return f"One model for all clients: {names[verdict.choice]}, {gap} better than tuned FedAvg's on the {where}."
