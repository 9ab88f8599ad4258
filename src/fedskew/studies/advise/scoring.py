"""One candidate of a race: run, or continued with more rounds, on validation data, and what it scored.

Scores are kept in <out>/scores.jsonl and runs in <out>/runs, so an interrupted race continues where it stopped. What
was spent and what was decided is in <out>/state.json.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import msgspec

from fedskew.core.files import write_atomically
from fedskew.core.method import Method
from fedskew.core.settings import UsageError
from fedskew.experiment.config import Experiment, method_of
from fedskew.experiment.extension import check_rounds
from fedskew.experiment.result import Result
from fedskew.experiment.run import Run
from fedskew.experiment.run_directory import drop_states, is_run, read_settings
from fedskew.federation.protocol import Record
from fedskew.methods._find import name_of
from fedskew.studies.advise.budget import Budget, BudgetUsed
from fedskew.studies.advise.goal import Goal, class_counts
from fedskew.studies.choice import SEED
from fedskew.studies.execution import file_name
from fedskew.studies.tune import on_validation

LONG = 20.0  # seconds of a run from which worker processes, which take seconds to start, are worth it
SCORES, STATE = "scores.jsonl", "state.json"
RACE_SEEDS = (SEED, SEED + 1)  # no final run uses them


@dataclass(frozen=True)
class Candidate:
    """A method with its settings, and a learning rate."""

    method: str  # text form: fedprox:mu=0.1
    lr: float

    @property
    def name(self) -> str:
        """The method's name, without its settings; of a user's own, `my.py:Name`."""
        return name_of(type(self.made))

    @property
    def made(self) -> Method:
        """The method itself."""
        return method_of(self.method)

    def __str__(self) -> str:
        return f"{self.method} lr={self.lr:g}"

    def of(self, base: Experiment) -> Experiment:
        """An experiment with this method and learning rate."""
        return replace(base, method=self.made, training=replace(base.training, lr=self.lr))


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate with one seed after some rounds, on validation data."""

    method: str
    lr: float
    seed: int
    rounds: int
    value: float | None  # the goal's figure; None: it failed, or has no such model
    shared: float | None = None  # the same measure of the global model; None: it has none
    own: float | None = None  # the same measure of the models that clients would use
    clients: dict[int, float] = {}  # what each client contributes to `value`, see `Goal.by_client`
    curve: list[tuple[int, float]] = []  # (rounds, the goal's figure) of each evaluation
    seconds: float = 0.0  # of one round, evaluation included
    failed: str = ""  # why it has no value; "": it did not fail
    warnings: list[str] = []  # classes that are never recognised, see evaluation/cautions.py

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.method, self.lr)


class State(msgspec.Struct, kw_only=True):
    """What must survive an interruption beside the scores."""

    settings: str  # a fingerprint of everything that was asked for
    spent: float = 0.0  # of the budget, in its unit
    chosen: dict[str, list[tuple[str, float]]] = {}  # by stage, the candidates that it was decided to run
    left_out: dict[str, str] = {}  # candidates, or methods, that the budget did not allow, and why
    done: int = 0  # rounds that were trained
    rounds: int | None = None  # of the final runs, if the budget is not enough for all; None: all
    more: int | None = None  # seeds that the budget allows for an open lead; None: not decided yet


Watch = Callable[[Candidate, int, Record, int], None]  # (candidate, seed, record, rounds of the run)


class Scorer:
    """Scores candidates within a budget. `options` say how to run (see `Run`); `clock` tells the time in seconds."""

    def __init__(
        self,
        base: Experiment,
        goal: Goal,
        out: Path,
        budget: Budget,
        *,
        every: int,
        fingerprint: str = "",
        watch: Watch | None = None,
        clock: Callable[[], float] = time.monotonic,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.base, self.goal, self.out, self.budget = base, goal, out, budget
        self.every, self.watch, self.clock, self.options = every, watch, clock, dict(options or {})
        self.found: Callable[[Score], None] = lambda score: None  # called with every new score
        self.speeds: dict[str, float] = {}  # seconds of a round, by method's name
        self.preparing = 0.0  # seconds until a run is ready to train, as the last one was
        self.ahead = 0  # rounds that were added to the plan: more seeds for an open lead
        self.counted = clock()  # time until here is in the budget
        self.state = self._restore(fingerprint)
        self.scores: dict[tuple[str, float, int, int], Score] = {}
        for score in self._read():
            self._keep(score)

    def _restore(self, fingerprint: str) -> State:
        path = self.out / STATE
        self.out.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            return State(settings=fingerprint)
        try:
            state = msgspec.json.decode(path.read_bytes(), type=State)
        except msgspec.DecodeError as error:
            raise UsageError(f"{path} cannot be read: {error}; remove {self.out} to start again.") from None
        if state.settings != fingerprint:
            raise UsageError(f"{self.out} holds advice with other settings; give another --out or remove it.")
        self.budget.spent = state.spent
        return state

    def _read(self) -> list[Score]:
        path = self.out / SCORES
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        if len(whole) < len(lines):  # the last one was being written when the race was interrupted
            write_atomically(path, b"".join(whole))
        try:
            return [msgspec.json.decode(line, type=Score) for line in whole]
        except msgspec.DecodeError as error:
            raise UsageError(f"{path} cannot be read: {error}; remove {self.out} to start again.") from None

    def save(self) -> None:
        """Write what was spent and decided."""
        self.state.spent = self.budget.spent
        write_atomically(self.out / STATE, msgspec.json.encode(self.state))

    def _keep(self, score: Score) -> None:
        self.scores[score.method, score.lr, score.seed, score.rounds] = score
        if score.seconds:
            self.speeds[score.candidate.name] = score.seconds

    def decided(self, stage: str, decide: Callable[[], list[Candidate]]) -> list[Candidate]:
        """What a stage runs: decided once, and kept, since it may depend on the time that was left."""
        if stage not in self.state.chosen:
            self.state.chosen[stage] = [(c.method, c.lr) for c in decide()]
            self.save()
        return [Candidate(*pair) for pair in self.state.chosen[stage]]

    def known(self, candidate: Candidate, seed: int, rounds: int) -> Score | None:
        """A score that was found before; None if it was not."""
        return self.scores.get((candidate.method, candidate.lr, seed, rounds))

    def seconds(self, candidate: Candidate) -> float:
        """How long one of its rounds takes: measured of this method, else of FedAvg, else 0."""
        return self.speeds.get(candidate.name, self.speeds.get("fedavg", 0.0))

    def predicted(self, candidate: Candidate, seed: int, rounds: int) -> float:
        """What a score would cost, in the budget's unit; 0 if it is known."""
        if self.known(candidate, seed, rounds) is not None:
            return 0.0
        before = [r for (m, lr, s, r) in self.scores if (m, lr, s) == (candidate.method, candidate.lr, seed)]
        extends = before and self._extends(candidate, max(before), rounds)
        cost = self.budget.cost(rounds - max(before) if extends else rounds, self.seconds(candidate))
        return cost + (self.preparing if self.budget.unit == "seconds" else 0.0)

    def experiment(self, candidate: Candidate, seed: int, rounds: int) -> Experiment:
        """The run of a candidate: judged on validation data, no test sample is used.

        A final run, which nothing is cut from, is evaluated five times in all.
        """
        trial = on_validation(candidate.of(replace(self.base, rounds=rounds)), seed)
        every = self.every if seed in RACE_SEEDS else max(self.every, -(-rounds // 5))
        return replace(trial, evaluation=replace(trial.evaluation, every=every))

    def _extends(self, candidate: Candidate, before: int, rounds: int) -> bool:
        """Whether a run of `before` rounds can be continued to `rounds`, with the result of one that had them all."""
        experiment = self.experiment(candidate, 0, rounds)
        try:
            check_rounds(before, experiment, len(experiment.method.stages(before)))
        except UsageError:
            return False
        return True

    def path(self, candidate: Candidate, seed: int, rounds: int) -> Path:
        """The run's directory: one for all rounds, or one of its own where more rounds need a new start."""
        name = f"{file_name(candidate.method)}-lr{candidate.lr:g}-s{seed}"
        longer = self._extends(candidate, rounds, rounds + 1)
        return self.out / "runs" / (name if longer else f"{name}-r{rounds}")

    def score(self, candidate: Candidate, seed: int, rounds: int, most: float = float("inf")) -> Score:
        """The score of a candidate, found before or now. A run that diverges or cannot be made has failed.

        `most` is what this run may cost; BudgetUsed is raised if it costs more or the budget ends. The run can be
        continued then.
        """
        if (found := self.known(candidate, seed, rounds)) is not None:
            return found
        if self.budget.left <= 0:
            raise BudgetUsed
        about: dict[str, Any] = {"method": candidate.method, "lr": candidate.lr, "seed": seed, "rounds": rounds}
        began = ready = self.clock()
        trained = 0
        try:
            run = self._run(candidate, seed, rounds)
            ready = self.clock()
            self.preparing = ready - began
            with closing(cast(Generator[Record], iter(run))) as records:  # ends the run's work at once
                for record in records:
                    trained += 1
                    self.charge(1)
                    if self.watch is not None:
                        self.watch(candidate, seed, record, run.rounds)
                    pace = (self.clock() - ready) / trained
                    over = self.budget.left < self.budget.cost(1, pace) or self.budget.cost(run.rounds, pace) > most
                    if record.number < run.rounds and over:  # the next round would not fit
                        self.speeds.setdefault(candidate.name, pace)
                        raise BudgetUsed
            score = self._scored(run, about, (self.clock() - ready) / max(trained, 1))
        except (RuntimeError, ValueError, ArithmeticError) as error:  # a method may fail on data it cannot use
            score = Score(**about, value=None, failed=str(error).strip().partition("\n")[0].rstrip("."))
        finally:
            self.charge()
            self.state.done += trained
            self.save()
        with (self.out / SCORES).open("ab") as file:
            file.write(msgspec.json.encode(score) + b"\n")
        self._keep(score)
        self.found(score)
        return score

    def forget(self, candidate: Candidate, seeds: Sequence[int], rounds: int) -> None:
        """Remove the models of a candidate that left the race; its records and scores stay."""
        for seed in seeds:
            path = self.path(candidate, seed, rounds)
            if is_run(path):
                drop_states(path)

    def charge(self, rounds: int = 0) -> None:
        """Add what was trained, or all the time since the last call, to what was spent."""
        now = self.clock()
        self.budget.spent += rounds if self.budget.unit == "rounds" else now - self.counted
        self.counted = now

    def _run(self, candidate: Candidate, seed: int, rounds: int) -> Run:
        experiment, path = self.experiment(candidate, seed, rounds), self.path(candidate, seed, rounds)
        options = dict(self.options)
        if options.get("workers") is None and rounds * self.seconds(candidate) < LONG:
            options["workers"] = 1
        started = is_run(path)
        if started and read_settings(path).rounds > rounds:
            raise UsageError(f"{path} holds a run of more than {rounds} rounds; remove it to start again.")
        return Run(experiment, out=path, resume=started, **options)

    def _scored(self, run: Run, about: dict[str, Any], seconds: float) -> Score:
        """The score of a run that is over."""
        from fedskew.evaluation.cautions import cautions

        assert run.result is not None
        if run.diverged:
            return Score(**about, value=None, seconds=seconds, failed=run.diverged)
        figure = self.goal.figure
        values = [(r.number, v) for r in run.records if (v := figure.of(r.metrics)) is not None]
        said = cautions(run.result.metrics, run.result.labels)
        return Score(
            **about,
            **values_of(run.result, self.goal),
            clients=clients_of(run, self.goal),
            curve=values,
            seconds=seconds,
            warnings=[s.removeprefix("warning: ") for s in said if s.startswith("warning: ")],
        )


def values_of(result: Result, goal: Goal) -> dict[str, Any]:
    """The goal's figure of a result, and the same measure of the global model and of the clients' own."""
    models = {"shared": replace(goal, model="global"), "own": replace(goal, model="own")}
    return {"value": goal.figure.read(result)} | {name: each.figure.read(result) for name, each in models.items()}


def clients_of(run: Run, goal: Goal) -> dict[int, float]:
    """What each client that trains contributes to the goal's figure."""
    assert run.result is not None
    rows = {c: row for c, row in run.result.clients.items() if int(c) not in run.assembled.newcomers}
    return goal.by_client(rows, class_counts(run.assembled.world, "test"))
