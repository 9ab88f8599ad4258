"""How good the advice is: leave one task of the board out, ask for advice on it, and look up what the board says.

    python -m fedskew.studies.regret --results results/advise/regret.json --docs docs/advise.md

It does every task that has evidence and is not in the results with that evidence; run it again to resume, or when the
board has another task.

For each task, `advise` gets the other tasks as evidence and a tenth of the rounds that the board spent on the task. Its
regret is how far the board's value of the method it chose is below that of the best method. Beside it stand the regret
of always using tuned FedAvg, and of using the method that is best on average on the other tasks.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import msgspec

from fedskew.core.files import sha256, write_atomically
from fedskew.core.settings import UsageError
from fedskew.evaluation.figures import FIGURES
from fedskew.experiment.config import Experiment, from_dict, method_of, read_toml
from fedskew.methods import REGISTRY
from fedskew.studies.advise import Advice, advise
from fedskew.studies.advise.goal import MEASURES
from fedskew.studies.board.evidence import Row, Task, read_task, shipped

SHARE = 0.1  # of the rounds that the board spent on a task
TUNED = 3  # learning rates that the board tried for each method
BASELINE = "fedavg"
MARKS = ("<!-- regret -->", "<!-- end of regret -->")  # of the table's place in a page


class Regret(msgspec.Struct, frozen=True, kw_only=True):
    """One task that was left out. Values and regrets are in the unit of its figure."""

    task: str
    goal: str  # key of the figure
    choice: str  # what advise said
    certain: bool  # False: it abstained, and the choice is FedAvg
    best: str  # the best method on the board, of those that advise may choose
    value: float | None  # the board's value of the choice; None: the board has none
    best_value: float
    regret: float | None  # of the advice
    always_fedavg: float | None
    best_elsewhere: str  # the method that is best on average on the other tasks; "": none is on all of them
    elsewhere: float | None  # its regret
    budget: int  # rounds that advise had
    exhaustive: int  # rounds that the board spent
    sentence: str
    evidence: dict[str, str] = {}  # the other tasks that the advice knew: name -> commit
    share: float = SHARE


def exhaustive_rounds(task: Task, rounds: int) -> int:
    """Rounds that the board trained for a task: each method with each learning rate once, and with every seed."""
    return sum(row.seeds + row.failed + TUNED for row in task.rows) * rounds


def usable(task: Task) -> list[Row]:
    """The rows that advise may choose: finished, known, and not a control that pools the data."""
    known = [row for row in task.rows if row.method.partition(":")[0] in REGISTRY and row.value is not None]
    return [row for row in known if not method_of(row.method).pooled]


def row_of(rows: Sequence[Row], method: str) -> Row | None:
    """The row of a method: with the same settings, else with others; None if there is none."""
    same = [row for row in rows if row.method == method]
    near = [row for row in rows if row.method.partition(":")[0] == method.partition(":")[0]]
    return next(iter([*same, *near]), None)


def goal_of(key: str) -> str:
    """The goal of advise that a board's figure stands for.

    Accuracy has no measure here: the board's is of a balanced test set, so where the clients' classes are not balanced
    the same question is about balanced accuracy, which advise takes by itself.

    >>> goal_of("global"), goal_of("balanced"), goal_of("personal_f1")
    ('global', 'global:balanced', 'own:f1')
    """
    model = "own" if key.startswith("personal") else "global"
    measure = next((m for m in MEASURES if m in key.split("_")), "")
    return f"{model}:{measure}" if measure else model


def elsewhere_best(task: Task, others: Sequence[Task]) -> str:
    """The method with the best mean lead over FedAvg on the other tasks, of those that all of them have."""
    leads: dict[str, list[float]] = {}
    for other in others:
        for row in usable(other):
            lead = 0.0 if row.method == BASELINE else row.over
            if lead is not None:
                sign = 1 if FIGURES[other.goal].better == "higher" else -1
                leads.setdefault(row.method, []).append(sign * lead)
    here = {row.method for row in usable(task)}
    common = {name: statistics.mean(v) for name, v in leads.items() if len(v) == len(others) and name in here}
    return max(common, key=lambda name: common[name]) if common else ""


Adviser = Callable[..., Advice]


def regret_of(
    task: Task,
    others: Sequence[Task],
    experiment: Experiment,
    *,
    share: float = SHARE,
    adviser: Adviser = advise,
    **options: Any,
) -> Regret:
    """Ask for advice on a task with the other tasks as evidence, and look up its regret on the board.

    `options` are those of `advise`: out, workers, data_dir, ...
    """
    rows, sign = usable(task), 1 if FIGURES[task.goal].better == "higher" else -1
    if row_of(rows, BASELINE) is None:
        raise UsageError(f"task {task.name} has no value of {BASELINE}: there is nothing to compare with.")
    exhaustive = exhaustive_rounds(task, experiment.rounds)
    budget = max(1, int(share * exhaustive))
    found = adviser(experiment, budget_rounds=budget, goal=goal_of(task.goal), evidence=list(others), **options)
    best = max(rows, key=lambda row: sign * (row.value or 0.0))
    assert best.value is not None
    name = elsewhere_best(task, others)

    def lost(method: str) -> float | None:
        row = row_of(rows, method) if method else None
        return None if row is None or row.value is None or best.value is None else sign * (best.value - row.value)

    chosen = row_of(rows, found.choice)
    return Regret(
        task=task.name,
        goal=task.goal,
        choice=found.choice,
        certain=found.certain,
        best=best.method,
        value=chosen.value if chosen is not None else None,
        best_value=best.value,
        regret=lost(found.choice),
        always_fedavg=lost(BASELINE),
        best_elsewhere=name,
        elsewhere=lost(name),
        budget=budget,
        exhaustive=exhaustive,
        sentence=found.sentence,
        evidence=evidence_of(others),
        share=share,
    )


def evidence_of(others: Sequence[Task]) -> dict[str, str]:
    """Which evidence an advice had: the commits of the tasks, by name."""
    return {other.name: other.commit for other in others}


def read_experiments(folder: Path | Traversable) -> dict[str, Experiment]:
    """The tasks' experiments by name: the table `experiment` of each TOML file, with the middle of its `rates`."""
    found = {}
    for file in sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name):
        values = read_toml(Path(str(file)))
        experiment = from_dict(values.get("experiment", {}))
        if rates := sorted(values.get("rates", [])):
            experiment = replace(experiment, training=replace(experiment.training, lr=rates[len(rates) // 2]))
        found[file.name.removesuffix(".toml")] = experiment
    return found


def table(regrets: Sequence[Regret]) -> str:
    """The regrets as a Markdown table, in points for shares, with the means below."""

    def text(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.2f}"

    lines = [
        "| task | knew | advice | certain | best on the board | regret | always FedAvg | best elsewhere | its regret |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in regrets:
        cells = [one.task, ", ".join(one.evidence) or "-", one.choice, "yes" if one.certain else "no"]
        cells += [f"{one.best} {text(one.best_value)}", text(one.regret), text(one.always_fedavg)]
        cells += [one.best_elsewhere or "-", text(one.elsewhere)]
        lines.append(f"| {' | '.join(cells)} |")
    means = [_mean([getattr(one, key) for one in regrets]) for key in ("regret", "always_fedavg", "elsewhere")]
    lines.append(f"| mean |  |  |  |  | {text(means[0])} | {text(means[1])} |  | {text(means[2])} |")
    return "\n".join(lines)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.mean(known) if known else None


def all_regrets(
    tasks: Sequence[Task],
    experiments: Mapping[str, Experiment],
    out: Path,
    share: float,
    results: Path | None = None,
    **options: Any,
) -> list[Regret]:
    """The regret of every task that has an experiment, in the order of their names; written to `results` after each.

    Those in `results` that had the same evidence and share are not run again. Those of other tasks stay there.
    results: a file; None is regret.json in `out`.
    """
    if not (known := [task for task in tasks if task.name in experiments]):
        raise UsageError("no task of the board has both evidence and a TOML file: there is nothing to leave out.")
    path = results or out / "regret.json"
    found = {one.task: one for one in read_regrets(path)}
    for task in known:
        others = [other for other in tasks if other.name != task.name]
        evidence, before = evidence_of(others), found.get(task.name)
        if before is None or (before.evidence, before.share) != (evidence, share):
            mark = sha256(repr((evidence, share)).encode())[:8]  # more evidence is another race
            folder = out / f"{task.name}-{mark}"
            found[task.name] = regret_of(task, others, experiments[task.name], share=share, out=folder, **options)
            in_order = [found[name] for name in sorted(found)]
            write_atomically(path, msgspec.json.format(msgspec.json.encode(in_order), indent=1) + b"\n")
        print(f"{task.name}: {found[task.name].sentence}", flush=True)
    return [found[name] for name in sorted(found)]


def read_regrets(path: Path) -> list[Regret]:
    """The regrets in a file that `all_regrets` wrote; none if there is no such file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Regret]) if path.exists() else []
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is no file of regrets: {error}.") from None


def put_table(page: Path, text: str) -> None:
    """Replace what is between the two marks of a Markdown page."""
    before, mark, rest = page.read_text().partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not mark or not end:
        raise UsageError(f"{page} has no place for the table: expected the lines {MARKS[0]} and {MARKS[1]}.")
    write_atomically(page, f"{before}{mark}\n{text}\n{end}{after}".encode())


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of regrets."""
    parser = argparse.ArgumentParser(prog="python -m fedskew.studies.regret", description=main.__doc__)
    home = resources.files("fedskew.studies.board")
    parser.add_argument(
        "--tasks", type=Path, default=None, help="folder of the tasks' TOML files; default: the board's"
    )
    parser.add_argument("--evidence", type=Path, default=None, help="folder of evidence files; default: the board's")
    parser.add_argument("--only", default="", help="names of tasks, separated by commas; default: all with evidence")
    parser.add_argument("--share", type=float, default=SHARE, help="of the rounds that the board spent on a task")
    parser.add_argument("--out", type=Path, default=Path("runs/regret"), help="folder of the runs")
    parser.add_argument("--results", type=Path, default=None, help="file of the regrets; default: OUT/regret.json")
    parser.add_argument("--docs", type=Path, default=None, help="Markdown page whose table is replaced")
    parser.add_argument("--workers", type=int, default=None, help="worker processes; default: all cores")
    parser.add_argument("--data-dir", type=Path, default=None, help="folder of data sets")
    given = parser.parse_args(arguments)
    try:
        tasks = shipped() if given.evidence is None else [read_task(f) for f in sorted(given.evidence.glob("*.json"))]
        folder = given.tasks or home / "tasks"
        if not folder.is_dir():
            raise UsageError(f"{folder} is no folder: expected one with the tasks' TOML files.")
        wanted = [name for name in given.only.split(",") if name]
        experiments = {k: v for k, v in read_experiments(folder).items() if not wanted or k in wanted}
        given.out.mkdir(parents=True, exist_ok=True)
        options = {"workers": given.workers, "data_dir": given.data_dir}
        made = table(all_regrets(tasks, experiments, given.out, given.share, given.results, **options))
        print(made)
        if given.docs is not None:
            put_table(given.docs, made)
    except UsageError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
