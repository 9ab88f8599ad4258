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
from fedskew.studies.advise.promotion import CUT, Fate
from fedskew.studies.advise.race import Race
from fedskew.studies.advise.scoring import Candidate
from fedskew.studies.advise.shortlist import Shortlist
from fedskew.studies.advise.verdict import Verdict, decide, listed, seeds_to_tell, sentence
from fedskew.studies.convergence import unsettled_curve
from fedskew.studies.ranking import FEWEST, Difference, gap_text, rank

MANY = 6  # names in one note
LEARNED = 0.05  # of the way from guessing to 1: a final that stays below it has found nothing to choose from
LONGEST = 30  # seeds that a note may propose
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


def no_better_than_guessing(verdict: Verdict, goal: Goal, profile: Profile, names: Mapping[str, str]) -> str:
    """That no method in the final has learned anything, in a sentence; "" if one has, or for a loss."""
    chance = goal.chance(profile.samples)
    best = next((s for s in verdict.standings if s.mean is not None), None)
    if chance is None or best is None or best.mean is None or best.mean > chance + LEARNED * (1 - chance):
        return ""
    figure = goal.figure
    rare = profile.labels[min(range(len(profile.labels)), key=lambda c: profile.samples[c])]
    return (
        f"No method has learned these data: the best in the final, {names[best.method]}, has "
        f"{figure.text(best.mean)} {figure.unit} {figure.measure} on the validation parts, and guessing has "
        f"{figure.text(chance)}. "
        f"Try more rounds (--rounds), larger learning rates, another net, or more samples of class '{rare}', which has "
        f"{min(profile.samples)}."
    )


def unsettled(finals: Finals, goal: Goal, profile: Profile) -> str:
    """That tuned FedAvg has not converged, in a sentence, by its mean curve over seeds; "" if it has, or for a loss."""
    curves = [s.curve for s in next(iter(finals.scores.values())).values() if s.curve]
    mean = [statistics.mean(v for _, v in at) for at in zip(*curves, strict=False)]
    chance = goal.chance(profile.samples)
    if not mean or chance is None or not (why := unsettled_curve(mean, len(profile.labels), chance=chance)):
        return ""
    return f"Tuned FedAvg {why}: with more rounds the order may change."


def notes(race: Race, finals: Finals, shortlist: Shortlist) -> list[str]:
    """What the reader should know about the answer."""
    found = [shortlist.note] if shortlist.note else []
    cut = dict.fromkeys(f.candidate.name for rung in race.rungs for f in rung.fates if f.why == CUT)
    raced = {c.name for c in finals.scores}
    if gone := [name for name in cut if name not in raced]:
        more = f" and {len(gone) - MANY} more" if len(gone) > MANY else ""
        shown = f"{', '.join(gone[:MANY])}{more}"
        found.append(f"Left the race by their rank, without being told apart from the leader: {shown}.")
    if late := {**race.left_out, **finals.left_out}:
        more = f" and {len(late) - MANY} more" if len(late) > MANY else ""
        found.append(f"Not raced to the end for lack of budget: {', '.join(list(late)[:MANY])}{more}.")
    missing = [name for name in ("fedavgm", "finetune", "local") if name in shortlist.excluded]
    if missing:
        found.append(f"Not run, as the limits or the goal ask: {listed(missing)}.")
    if FEWEST <= len(finals.seeds) < finals.wanted:
        found.append(f"The budget was enough for {len(finals.seeds)} of {finals.wanted} seeds.")
    return found


def open_lead(verdict: Verdict, finals: Finals, figure: Figure, names: Mapping[str, str]) -> list[str]:
    """How many seeds were run for a lead that was open, and how many would tell now; empty if neither is the case."""
    run, found = len(finals.seeds), []
    if run > finals.wanted:
        found.append(f"{finals.wanted} seeds left a lead open, so {run} were run.")
    values, baseline = finals.values(), str(next(iter(finals.scores)))
    if wanted := seeds_to_tell(verdict, values, figure, baseline, LONGEST):
        name, seeds = wanted
        found.append(
            f"If {names[name]} stays as far ahead as it is, about {seeds} seeds would tell it apart from tuned FedAvg: "
            f"give a larger budget, with --seeds 0-{seeds - 1}."
        )
    return found


def is_compared(finals: Finals) -> bool:
    """Whether the budget was enough to compare two methods, if only after fewer rounds."""
    return len(finals.seeds) >= FEWEST and len(finals.scores) > 1


def short_sentence(
    verdict: Verdict, finals: Finals, figure: Figure, baseline: str, names: Mapping[str, str], alone: str | None
) -> str:
    """What a final that was cut short shows: who is ahead by then, on validation data. It recommends nothing."""
    shown = {s.method: s for s in verdict.standings}
    when = f"after {finals.rounds} of {finals.whole} rounds"
    start = f"There is no answer for {finals.whole} rounds: the budget was enough for finals of {finals.rounds}."
    if verdict.certain and (over := shown[verdict.choice].over) is not None:
        found = f"{names[verdict.choice]} is {gap_text(over, figure)} better than tuned FedAvg {when}"
    else:
        found = f"No method is told apart from tuned FedAvg {when}"
    values = [("tuned FedAvg", baseline), *([("training alone", alone)] if alone in shown else [])]
    given = " and ".join(f"{name} has {figure.text(shown[key].mean)}" for name, key in values if key)
    unit = f" {figure.unit}" if figure.unit else ""
    return f"{start} {found}; {given}{unit} on the validation parts. Until more is known use {names[baseline]}."


def too_little(finals: Finals, budget: Budget) -> str:
    """What would be enough, if the budget was not even enough to compare two methods after all rounds; else ""."""
    if is_compared(finals) and not finals.short:
        return ""
    return (
        f"About {budget.text(finals.enough)} should be enough to compare FedAvg with another method; less with fewer "
        "--rounds, or with fewer clients a round (--clients-per-round)."
    )


def warnings(finals: Finals, chosen: Candidate) -> list[str]:
    """Classes that the chosen method never recognises, and final runs that failed."""
    found = []
    for candidate, of in finals.scores.items():
        failed = [score for score in of.values() if score.failed]
        if failed:
            found.append(f"{candidate} failed with seed {failed[0].seed}: {failed[0].failed}.")
    for seed, score in finals.scores[chosen].items():
        if score.warnings:
            return [*found, *(f"{w} ({chosen}, seed {seed}, validation parts)" for w in score.warnings)]
    return found
