"""What is said beside the answer: notes, warnings, and what replaces it where nothing can be recommended."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from fedskew.evaluation.figures import Figure
from fedskew.studies.advise.budget import Budget
from fedskew.studies.advise.finals import Finals
from fedskew.studies.advise.goal import Goal
from fedskew.studies.advise.profile import Profile
from fedskew.studies.advise.promotion import CUT
from fedskew.studies.advise.race import Race
from fedskew.studies.advise.scoring import Candidate
from fedskew.studies.advise.shortlist import Shortlist
from fedskew.studies.advise.verdict import Verdict, listed, seeds_to_tell
from fedskew.studies.convergence import unsettled_curve
from fedskew.studies.ranking import FEWEST, gap_text

MANY = 6  # names in one note
LEARNED = 0.05  # of the way from guessing to 1: a final that stays below it has found nothing to choose from
LONGEST = 30  # seeds that a note may propose


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
