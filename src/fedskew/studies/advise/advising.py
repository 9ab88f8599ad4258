"""`advise`: profile, shortlist, race, final, answer."""

from __future__ import annotations

import json
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from fedskew.core.files import sha256, write_atomically
from fedskew.core.settings import UsageError
from fedskew.data.sources.loading import load
from fedskew.experiment.assemble import Assembled, assemble
from fedskew.experiment.config import Experiment, Stop
from fedskew.experiment.machine import pick_device
from fedskew.experiment.nets import net_maker
from fedskew.experiment.progress import ProgressWriter, Step, StudyProgress
from fedskew.federation.protocol import Record
from fedskew.studies.advise.advice import Advice, Progress, make_advice
from fedskew.studies.advise.budget import Budget
from fedskew.studies.advise.finals import run_finals, seeds_after, test_values
from fedskew.studies.advise.goal import class_counts, is_balanced, read_goal
from fedskew.studies.advise.profile import profile_of
from fedskew.studies.advise.race import ETA, run_race, rungs_of
from fedskew.studies.advise.scoring import RACE_SEEDS, Candidate, Score, Scorer
from fedskew.studies.advise.shortlist import Limits, make_shortlist
from fedskew.studies.board.evidence import Task, shipped
from fedskew.studies.ranking import FEWEST
from fedskew.studies.tune import on_validation

MINUTES = 10.0
SEEDS = (0, 1, 2, 3, 4)  # of the final
Watch = Callable[[Progress], None]


def advise(
    experiment: Experiment | None = None,
    *,
    minutes: float | None = None,
    budget_rounds: int | None = None,
    limits: Limits | None = None,
    goal: str | None = None,
    seeds: Sequence[int] | None = None,
    methods: Sequence[str] = (),
    out: Path | str | None = None,
    evidence: Sequence[Task] | None = None,
    watch: Watch | None = None,
    clock: Callable[[], float] = time.monotonic,
    began: float | None = None,
    **options: Any,
) -> Advice:
    """Find the method to use on these data: race methods on the clients' validation parts, answer in a sentence.

    Args:
        experiment: data, split, model and training; its method is ignored, its learning rate is where the search
            starts, its rounds are those of a whole run. None: the default experiment.
        minutes: what all runs together may take; None with `budget_rounds` None: 10.
        budget_rounds: in place of minutes, how many rounds all runs together may train.
        limits: what a method may not need; None: anything goes.
        goal: "own" (the model that each client would use), "global" (one model for all), or with a measure as in
            "global:f1"; None is "own". The measure is accuracy, or balanced accuracy where classes are not balanced.
        seeds: of the final runs, at least three; no others are run. None: 0 to 4, and up to 20 in all if a lead is
            still open and the budget allows.
        methods: race these and FedAvg, FedAvgM, fine-tuned FedAvg and local, in place of a shortlist.
        out: folder of the runs and the answer; the same call continues there. None: a temporary one.
        evidence: the board's tasks for the shortlist; None: those that ship with fedskew.
        watch: called with a `Progress` after each round.
        clock: tells the time in seconds.
        began: when, by the clock, the budget's minutes began; None: now.
        options: how to run: workers, engine, device, data_dir (see `Run`).
    """
    given = Experiment() if experiment is None else experiment
    base = replace(given, stop=Stop(), evaluation=replace(given.evaluation, clients=0, metric="", diagnose=False))
    limits, first = limits or Limits(), check_seeds(SEEDS if seeds is None else seeds)
    more = seeds_after(first) if seeds is None else ()
    budget = make_budget(minutes, budget_rounds)
    options = {"device": pick_device(str(options.pop("device", "auto"))), **options}
    tasks = list(shipped() if evidence is None else evidence)
    began = clock() if began is None else began
    if isinstance(base.data, str):  # once, not for each run: it may take longer than a short run
        options["loaded"] = load(base.data, data_folder(options))
    ready = assembled_for(base, options)
    target = read_goal(goal, is_balanced(class_counts(ready.world, "validation")))
    profile = profile_of(ready)
    shortlist = make_shortlist(
        profile.figures,
        target,
        limits,
        tasks,
        public=profile.public,
        net=(net_maker(base, ready.data), ready.data.shape, ready.data.classes),
        given=methods,
    )
    with ExitStack() as stack:
        folder = Path(out) if out is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        scorer = Scorer(
            base,
            target,
            folder,
            budget,
            every=-(-rungs_of(base.rounds)[0] // 2),
            fingerprint=fingerprint(base, limits, goal, [*first, *more], methods, budget, tasks),
            clock=clock,
            options=options,
        )
        shown = StudyProgress(
            kind="advise",
            title=f"advice on {ready.data.name}, {base.split}",
            figure=target.figure.key,
            note=f"On the clients' validation parts; seeds {RACE_SEEDS[0]} and {RACE_SEEDS[1]}: the race.",
            mark=scorer.state.settings,
            unit="rounds",
        )
        if budget.unit == "seconds":
            budget.spent += scorer.counted - began
        with ProgressWriter(folder, shown) as writer:
            for score in scorer.scores.values():
                writer.add(score_step(score))
            scorer.found = lambda score: writer.add(score_step(score))
            scorer.watch = _watcher(scorer, watch, writer, len(shortlist.methods), len(first))
            race = run_race(scorer, list(shortlist.methods), base.rounds)
            finals = run_finals(scorer, race, base.rounds, first, more)
            tested = test_values(scorer, finals, finals.rounds)
            scorer.charge()
            scorer.save()
            advice = make_advice(given, target, profile, shortlist, race, finals, tested, budget)
        if out is not None:
            advice = replace(advice, directory=str(folder), command=_write(advice, folder, options))
    return advice


def _write(advice: Advice, folder: Path, options: Mapping[str, Any]) -> str:
    """Write the chosen experiment and advise.json; the command that runs it, "" if the data or net are objects."""
    path = folder / "chosen.toml"
    named = isinstance(advice.experiment.data, str) and isinstance(advice.experiment.model, str)
    command = ""
    if named and isinstance(advice.experiment.public, str):
        write_atomically(path, f"# chosen by fedskew advise\n{advice.experiment.to_toml()}".encode())
        where = ["--data-dir", str(options["data_dir"])] if options.get("data_dir") else []
        command = shlex.join(["fedskew", "run", "--config", str(path), *where])
    content = {**advice.as_dict(), "command": command, "directory": str(folder)}
    write_atomically(folder / "advise.json", msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    return command


def assembled_for(base: Experiment, options: Mapping[str, Any]) -> Assembled:
    """The base experiment as the race sees it: FedAvg, on validation data. Mistakes in the settings show here."""
    trial = on_validation(Candidate("fedavg", base.training.lr).of(base), RACE_SEEDS[0])
    return assemble(trial, data_dir=data_folder(options), device=str(options["device"]), loaded=options.get("loaded"))


def data_folder(options: Mapping[str, Any]) -> Path | None:
    """Where named data sets are; None: the default folder."""
    return Path(options["data_dir"]) if options.get("data_dir") else None


def make_budget(minutes: float | None, rounds: int | None) -> Budget:
    """The budget that was asked for; UsageError if it cannot be meant."""
    if minutes is not None and rounds is not None:
        raise UsageError("minutes and a budget in rounds exclude each other: expected one of them.")
    if rounds is not None:
        if rounds < 1:
            raise UsageError(f"a budget of {rounds} rounds is invalid: expected at least 1.")
        return Budget(rounds, "rounds")
    chosen = MINUTES if minutes is None else minutes
    if not 0 < chosen < float("inf"):
        raise UsageError(f"minutes={chosen:g} is invalid: expected a number above 0.")
    return Budget(60 * chosen, "seconds")


def check_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    """The seeds of the final, if they can tell a difference from luck and the race does not use them."""
    chosen = tuple(dict.fromkeys(seeds))
    if len(chosen) < FEWEST:
        few = f"{len(chosen)} {'seed is' if len(chosen) == 1 else 'seeds are'} too few to tell a difference from luck"
        raise UsageError(f"{few}: expected {FEWEST} or more, as in --seeds 0-4.")
    if set(chosen) & set(RACE_SEEDS):
        raise UsageError(
            f"seeds {RACE_SEEDS[0]} and {RACE_SEEDS[1]} are those of the race: expected others for the final."
        )
    return chosen


def fingerprint(
    base: Experiment,
    limits: Limits,
    goal: str | None,
    seeds: Sequence[int],
    methods: Sequence[str],
    budget: Budget,
    tasks: Sequence[Task],
) -> str:
    """A hash of everything that was asked for."""
    settings = {key: value for key, value in base.as_dict().items() if key not in ("method", "seed")}
    known = [(task.name, task.commit) for task in tasks]
    asked = [settings, asdict(limits), goal, list(seeds), list(methods), budget.limit, budget.unit, known]
    return sha256(json.dumps(asked, sort_keys=True, default=str).encode())


def planned_rounds(methods: int, rounds: int, seeds: int) -> int:
    """About how many rounds all runs together will train, before anything is known about them."""
    rungs, count = rungs_of(rounds), 3.5 * methods  # three learning rates, and some further candidates
    total = count * rungs[0]
    for before, rung in pairwise(rungs):
        count = max(count / ETA, 6)
        total += count * (rung - before)
    return round(total * len(RACE_SEEDS) + 7 * seeds * rounds)


def _watcher(
    scorer: Scorer, watch: Watch | None, writer: ProgressWriter, methods: int, seeds: int
) -> Callable[[Candidate, int, Record, int], None]:
    """What the scorer calls after each round: it adds how far the whole is, and how long it will take."""
    planned, done, began = planned_rounds(methods, scorer.base.rounds, seeds), scorer.state.done, scorer.clock()
    now = 0

    def tell(candidate: Candidate, seed: int, record: Record, rounds: int) -> None:
        nonlocal now
        now += 1
        total = planned + scorer.ahead
        passed = scorer.clock() - began
        ahead = passed / now * max(total - done - now, 0)
        if scorer.budget.unit == "seconds":
            ahead = min(ahead, max(scorer.budget.left, 0.0))
        text = f"{candidate} seed {seed} round {record.number}/{rounds}"
        writer.tell(text, min(done + now, total), total, ahead)
        if watch is not None:
            watch(Progress(min(done + now, total), total, text, ahead))

    return tell


def score_step(score: Score) -> Step:
    """A score as `fedskew watch` shows it: of a candidate and a seed the one after the most rounds."""
    return Step(
        method=str(score.candidate),
        part=f"seed {score.seed}",
        value=score.value,
        failed=score.failed,
        rounds=score.rounds,
        curve=score.curve,
    )
