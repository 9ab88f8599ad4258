"""Fair tuning: every method gets the same number of trials, evaluated on validation data. No test sample is used.

A trial is a whole run. Optuna (TPE) draws its learning rate and the method's weights from ranges on a log scale. The
first trial uses the defaults (a weight whose default is None starts in the middle of its range). Trials are kept in
<out>/study.db and their records in <out>/trials, so an interrupted search can be resumed and watched. The best trial
of each method is written as an experiment file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedskew.core.files import write_atomically
from fedskew.core.method import Method
from fedskew.core.settings import UsageError, library, parse, unknown
from fedskew.evaluation.figures import check_goal, goal_figure, headline
from fedskew.evaluation.metrics import Metrics
from fedskew.experiment.config import Experiment, method_of
from fedskew.experiment.run_directory import drop_states
from fedskew.studies.execution import execute, file_name

Range = tuple[float, float]
VALIDATION = 0.2  # of each client's samples, where the experiment keeps none
WORST = 1e6  # stands for a diverged run where the goal is to be minimised
REACH = 10.0  # the learning rate is searched from the experiment's divided by this to it times this


def space(text: str, lr: float, given: Mapping[str, Range]) -> dict[str, Range]:
    """The ranges searched for one method: `lr`, and `method.<field>` for the fields that declare a range.

    A field that `text` sets, as in "fedprox:mu=0.5", is not searched. `given` are the user's ranges, by `lr` or
    `<method>.<field>`; they may name any field.
    """
    name, fixed = parse(text, "method")[0]
    kind = type(method_of(text))
    fields = declared_ranges(kind)
    own = {key.partition(".")[2]: value for key, value in given.items() if key.startswith(f"{name}.")}
    known = {f.name for f in dataclasses.fields(kind)}
    for key in own:
        if key not in known:
            raise unknown(f"setting of method {name}", key, known)
    ranges = {f"method.{key}": value for key, value in (fields | own).items() if key not in fixed}
    return {"lr": given.get("lr", (lr / REACH, lr * REACH))} | ranges


def declared_ranges(kind: type[Method]) -> dict[str, Range]:
    """The ranges that a method's fields declare with `setting(..., search=(low, high))`."""
    ranges = {f.name: f.metadata.get("search") for f in dataclasses.fields(kind)}
    return {name: span for name, span in ranges.items() if span}


def read_range(text: str) -> tuple[str, Range]:
    """`fedprox.mu=0.001:1` -> ("fedprox.mu", (0.001, 1.0))."""
    name, _, value = text.partition("=")
    low, _, high = value.partition(":")
    try:
        made = float(low), float(high)
    except ValueError:
        made = (0.0, 0.0)
    if not 0 < made[0] < made[1]:
        raise UsageError(
            f"--range {text} is invalid: expected name=low:high with 0 < low < high, as in fedprox.mu=0.001:1."
        )
    return name.strip(), made


@dataclass(frozen=True)
class Search:
    """What to search: methods, how many trials each gets, and the experiment they are tried on."""

    base: Experiment
    methods: tuple[str, ...]  # with settings that stay fixed: fedprox:mu=0.1
    budget: int  # trials of each method
    seeds: tuple[int, ...]
    out: Path
    # what is tuned: "global" or "personal" accuracy, or a figure such as "f1". None: the global model if the method
    # has one, else the personal models; balanced accuracy where the validation samples are not balanced
    goal: str | None = None
    ranges: Mapping[str, Range] = dataclasses.field(default_factory=dict)  # the user's, by `lr` or `<method>.<field>`

    def spaces(self) -> dict[str, dict[str, Range]]:
        """The ranges of each method, by name of the setting."""
        names = {parse(text, "method")[0][0] for text in self.methods}
        for key in self.ranges:
            if key != "lr" and key.partition(".")[0] not in names:
                raise unknown("method of --range", key.partition(".")[0], names)
        return {text: space(text, self.base.training.lr, self.ranges) for text in self.methods}

    def trial(self, text: str, values: Mapping[str, float], seed: int) -> Experiment:
        """The experiment of one trial, evaluated on validation data after the last round."""
        return on_validation(self.chosen(text, values), seed)

    def chosen(self, text: str, values: Mapping[str, float]) -> Experiment:
        """The base experiment with these values: what is written to the method's file."""
        own = {key.partition(".")[2]: value for key, value in values.items() if key.startswith("method.")}
        training = replace(self.base.training, lr=values["lr"])
        return replace(self.base, method=replace(method_of(text), **own), training=training)


def on_validation(experiment: Experiment, seed: int) -> Experiment:
    """The experiment with another seed, evaluated once, after the last round, on validation data."""
    holdout = replace(experiment.holdout, validation=experiment.holdout.validation or VALIDATION)
    rounds = len(experiment.method.stages(experiment.rounds))
    evaluation = replace(experiment.evaluation, part="validation", every=rounds)
    return replace(experiment, holdout=holdout, evaluation=evaluation, seed=seed)


def criterion(metrics: Metrics, goal: str | None) -> float | None:
    """What is maximised, over the validation samples of all clients; None if the run has no such figure.

    "global" is the global model's accuracy over all samples, "personal" the mean of the personal models' accuracies.
    None is one of these (see `accuracy_goal`) if the samples are balanced, else the balanced accuracy. Any other goal
    is a figure (see `leading_figure`), negative where lower is better.
    """
    clients = metrics.clients
    assert clients is not None  # every client has validation samples
    if goal is None:
        shared = clients.global_ is not None
        goal = "balanced" if (clients.global_ or clients.personal).balanced is False else accuracy_goal(shared)
    if goal == "personal":
        return clients.personal.mean
    if goal == "global":
        assert clients.global_ is not None  # see `check_goal_of`
        return clients.global_.weighted
    value = headline(metrics, goal)
    return -value if value is not None and goal_figure(goal).better == "lower" else value


def accuracy_goal(has_global: bool) -> str:
    """The goal of accuracy: the global model where a method has one, else the personal models."""
    return "global" if has_global else "personal"


def check_goal_of(method: Method, goal: str | None) -> None:
    """Raise `UsageError` if the goal is a figure that this method does not have."""
    check_goal(goal)
    if goal == "global" and not method.has_global:
        raise UsageError(f"{type(method).__name__} has no global model; tune it with --goal personal.")


Watch = Callable[[str, int, float], None]  # (method, number of the trial, its value), called after each trial


def search(plan: Search, watch: Watch, **options: Any) -> list[dict[str, Any]]:
    """Run every method's trials until its budget is used up. `options` say how to run (see `Run`).

    Returns one line per method with its best values and the file they were written to; also written to tune.json.
    """
    optuna = library("optuna", "tune")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    spaces = plan.spaces()
    for text in plan.methods:
        check_goal_of(method_of(text), plan.goal)
    plan.out.mkdir(parents=True, exist_ok=True)
    lines = []
    for text in plan.methods:
        study = _study(optuna, plan, text, spaces[text])
        for number in _left(optuna, study, plan.budget):
            # seeded by the trial's number, so that a resumed search draws what an uninterrupted one would
            study.sampler = optuna.samplers.TPESampler(seed=1000 * plan.base.seed + number)
            trial = study.ask()
            values = {key: trial.suggest_float(key, *span, log=True) for key, span in spaces[text].items()}
            value = _evaluated(plan, text, values, options)
            study.tell(trial, value)
            watch(text, number, value)
        lines.append(_line(plan, text, study))
    summary = {"budget": plan.budget, "seeds": plan.seeds, "settings": plan.base.as_dict(), "methods": lines}
    write_atomically(plan.out / "tune.json", (json.dumps(summary, indent=1) + "\n").encode())
    return lines


def _study(optuna: Any, plan: Search, text: str, spans: Mapping[str, Range]) -> Any:
    """Optuna's study of one method, new or resumed. Refuses to resume a study with other settings."""
    goal = [plan.goal] if plan.goal not in (None, "global", "personal") else []
    settings = json.dumps([plan.trial(text, {"lr": 1.0}, 0).as_dict(), spans, plan.seeds, *goal], sort_keys=True)
    mark = hashlib.sha256(settings.encode()).hexdigest()
    storage = f"sqlite:///{plan.out / 'study.db'}"
    study = optuna.create_study(study_name=text, storage=storage, direction="maximize", load_if_exists=True)
    if study.user_attrs.get("settings", mark) != mark:
        raise UsageError(f"{plan.out} holds a search of {text} with other settings; give another --out or remove it.")
    if not study.trials:
        study.set_user_attr("settings", mark)
        start = {"lr": plan.base.training.lr} | _defaults(method_of(text), spans)
        study.enqueue_trial({key: min(max(value, spans[key][0]), spans[key][1]) for key, value in start.items()})
    return study


def _defaults(method: Method, spans: Mapping[str, Range]) -> dict[str, float]:
    """The first trial's values: the method's own, or the middle of the range (on a log scale) where that is None."""
    own = {key: getattr(method, key.partition(".")[2]) for key in spans if key.startswith("method.")}
    return {key: math.sqrt(spans[key][0] * spans[key][1]) if value is None else value for key, value in own.items()}


def _left(optuna: Any, study: Any, budget: int) -> Iterator[int]:
    """The numbers of the trials still to do. An interrupted trial is marked as failed and repeated."""
    states = optuna.trial.TrialState
    for trial in study.get_trials(deepcopy=False, states=(states.RUNNING,)):
        study.tell(trial.number, state=states.FAIL)
    done = len(study.get_trials(deepcopy=False, states=(states.COMPLETE,)))
    return iter(range(done + 1, budget + 1))


def _evaluated(plan: Search, text: str, values: Mapping[str, float], options: Mapping[str, Any]) -> float:
    """A trial's value: the mean over seeds of what is maximised, the worst if a run diverges. The trial counts."""
    worst = 0.0 if plan.goal is None or goal_figure(plan.goal).better == "higher" else -WORST
    found = []
    for seed in plan.seeds:
        trial = plan.trial(text, values, seed)
        mark = hashlib.sha256(trial.to_toml().encode()).hexdigest()[:10]
        path = plan.out / "trials" / f"{file_name(text)}-s{seed}-{mark}"
        outcome = execute(trial, path, **options)
        drop_states(path)
        if outcome.failed or outcome.result is None or outcome.result.metrics is None:
            return worst
        value = criterion(outcome.result.metrics, plan.goal)
        if value is None:
            raise UsageError(f"--goal {plan.goal} cannot be tuned: on validation data {text} has no such figure.")
        found.append(value if math.isfinite(value) else worst)
    return statistics.mean(found)


def _line(plan: Search, text: str, study: Any) -> dict[str, Any]:
    """Write a method's best values to its file; the summary of its trials."""
    best = study.best_trial
    path = plan.out / f"{file_name(text)}.toml"
    what = f"{plan.goal or 'accuracy'} {abs(best.value):.4f}"
    head = f"# {text}: the best of {plan.budget} trials of fedskew tune, {what} on validation data\n"
    write_atomically(path, (head + plan.chosen(text, best.params).to_toml()).encode())
    trials = [{"values": t.params, "accuracy": t.value} for t in study.trials if t.value is not None]
    return {"method": text, "accuracy": best.value, "values": best.params, "file": str(path), "trials": trials}
