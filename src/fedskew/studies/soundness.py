"""The soundness battery: every method with its defaults on small nets and skewed splits, beside FedAvg.

It asks whether a default surprises its user, not which method is best. Data are scikit-learn's digits, enlarged for
the nets that need it, so nothing is fetched. FedAvg's learning rate is chosen for each net on validation data, and all
methods use it; it falls to zero by a cosine, so that curves settle. A split is drawn once: seeds differ by the initial
model and the batches alone. Else the noise would be that of the splits, which is many times larger. A cell that looks
weak with one seed gets two more before it is judged. The noise is that of FedAvg's own seeds. Where FedAvg itself is
half-trained or still rises there is no verdict: below it may only mean slower.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from fedskew.core.method import Method
from fedskew.core.training import Training
from fedskew.data.dataset import DataSet
from fedskew.data.sources.loading import load
from fedskew.data.split.chain import make_partition
from fedskew.experiment.config import Evaluation, Experiment
from fedskew.methods import REGISTRY
from fedskew.studies.choice import choose_rate
from fedskew.studies.execution import execute
from fedskew.studies.pool import process_pool
from fedskew.studies.soundness_verdict import (
    BESIDE_PUBLIC,
    KINDS,
    LAST,
    REFERENCES,
    Cell,
    Score,
    Scores,
    Verdict,
    judge,
)


class Regime(NamedTuple):
    """How a net is trained in the battery: about as long as FedAvg needs on each split to settle."""

    model: str
    rounds: Mapping[str, int]  # by split
    batch: int = 32
    enlarge: int = 1  # each pixel of the 8 x 8 digits becomes a square of this side
    clip: float | None = None  # of gradients: without it a client alone diverges with simple-cnn


NETS = {
    "mlp": Regime("mlp", {"iid": 12, "dirichlet": 20, "two": 24}),
    "simple-cnn": Regime("simple-cnn", {"iid": 14, "dirichlet": 20, "two": 40}, batch=10, enlarge=3, clip=5.0),
    "cnn4": Regime("cnn4:width=16", {"iid": 6, "dirichlet": 20, "two": 32}, enlarge=2),
    "resnet8": Regime("resnet8:width=8", {"iid": 8, "dirichlet": 30, "two": 16}, batch=64),
}
SPLITS = {
    "iid": "iid:clients=5",
    "dirichlet": "dirichlet:alpha=0.1,clients=5,min=10",
    "two": "pcdd:clients=5,classes=2",
}
SPLIT_SEED = 0
KEEP = "sample:keep=1000+"
PUBLIC = "public:per_class=5+"  # before the split of a method that needs public data
RATES, SEEDS = (0.1, 0.2, 0.4), (0, 1, 2)
UNUSED = ("weak_where", "formula")  # declarations of a method that no run depends on


@cache
def data(enlarge: int, split: str) -> DataSet:
    """The samples of a split of the digits, with their clients as owners.

    enlarge: each pixel becomes a square of this side: simple-cnn and cnn4 need 16 x 16 or more.
    """
    small = load("digits")
    clients = make_partition(split, small.y_train, seed=SPLIT_SEED).clients
    chosen = np.concatenate(clients)
    return replace(
        small,
        name=f"digits {8 * enlarge}x{8 * enlarge} {split}",
        x_train=small.x_train[chosen].repeat(enlarge, 1).repeat(enlarge, 2),
        y_train=small.y_train[chosen],
        x_test=small.x_test.repeat(enlarge, 1).repeat(enlarge, 2),
        owners_train=np.repeat(np.arange(len(clients)), [len(samples) for samples in clients]),
    )


class Job(msgspec.Struct, frozen=True):
    """One run of the battery."""

    cell: Cell
    seed: int
    rate: float


def experiment(job: Job, kind: type[Method]) -> Experiment:
    """The experiment of one run: the method's defaults, and the learning rate of its net."""
    regime = NETS[job.cell.net]
    return Experiment(
        method=kind(),
        data=data(regime.enlarge, KEEP + SPLITS[job.cell.split]),
        split=(PUBLIC if kind.public or job.cell.method == BESIDE_PUBLIC else "") + "natural",
        model=regime.model,
        rounds=regime.rounds[job.cell.split],
        seed=job.seed,
        training=Training(lr=job.rate, schedule="cosine", epochs=2, batch_size=regime.batch, clip=regime.clip),
        evaluation=Evaluation(every=1),
    )


def run_job(job: Job, out: Path) -> Score:
    """Carry out one run, or read it; an exception of the method is its score.

    The directory changes with the method's settings and source code, so that a method that changed is run again.
    """
    torch.set_num_threads(1)
    kind = KINDS[job.cell.method]
    made = experiment(job, kind)
    path = out / job.cell.net / job.cell.split / f"{job.cell.method}-s{job.seed}-{mark(made, source(kind))}"
    try:
        outcome = execute(made, path, workers=1)
    except Exception as error:  # a method that breaks is a verdict on it, not the end of the battery
        return Score(None, f"{type(error).__name__}: {error}")
    if outcome.failed:
        return Score(None, outcome.failed)
    curve = tuple(
        record.metrics.global_.accuracy
        if kind.has_global and record.metrics.global_
        else record.metrics.clients.personal.mean
        for record in outcome.records
        if record.metrics is not None and record.metrics.clients is not None
    )
    return Score(statistics.mean(curve[-LAST:]), curve=curve)


def mark(made: Experiment, code: str = "") -> str:
    """A text that differs between other settings or other code: the end of a directory's name."""
    return hashlib.sha256(f"{made.to_toml()}{code}".encode()).hexdigest()[:10]


def source(kind: type[Method]) -> str:
    """The source code of a method, its file or package, without what its page says only (UNUSED)."""
    path = Path(inspect.getfile(kind))
    files = sorted(path.parent.glob("*.py")) if path.name == "__init__.py" else [path]
    return "".join(without_page(file.read_text()) for file in files)


def without_page(text: str) -> str:
    """Python source without its assignments to the names in UNUSED.

    >>> without_page("class A:\\n    x = 1\\n    weak_where = {\\n        'two': 'slow.'\\n    }\\n    y = 2\\n")
    'class A:\\n    x = 1\\n    y = 2\\n'
    """
    lines = dict(enumerate(text.splitlines(keepends=True), start=1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in UNUSED:
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                del lines[number]
    return "".join(lines.values())


def rates(nets: Iterable[str], out: Path) -> dict[str, float]:
    """FedAvg's learning rate for each net, chosen on validation data of the split with two classes each."""
    found = {}
    for net in nets:
        base = experiment(Job(Cell("fedavg", net, "two"), 0, RATES[0]), REGISTRY["fedavg"])
        found[net] = choose_rate(base, RATES, out / "rates" / f"{net}-{mark(base)}", workers=1)
    return found


Say = Callable[[str], None]


def run_battery(
    out: Path, *, methods: Sequence[str], nets: Sequence[str], splits: Sequence[str], workers: int, say: Say
) -> tuple[dict[str, float], list[Verdict]]:
    """Run what is not finished, and judge every cell. Returns the learning rates and the verdicts.

    Args:
        out: folder of the runs, one directory each; run it again after an interruption.
        methods: names of methods; the REFERENCES, which others are compared with, are added.
        nets, splits: names in NETS and SPLITS.
        workers: processes; each carries out one run at a time.
        say: called with a line for each finished run.
    """
    chosen = rates(nets, out)
    scores: Scores = {}
    with process_pool(workers) as map_jobs:

        def carry_out(jobs: Sequence[Job]) -> None:
            for job, score in zip(jobs, map_jobs(run_job, jobs, [out] * len(jobs)), strict=True):
                scores[job.cell, job.seed] = score
                result = score.failed or f"{100 * (score.accuracy or 0):.1f} %"
                say(f"{job.cell.net} {job.cell.split} {job.cell.method} seed {job.seed}: {result}")

        def jobs_of(names: Iterable[str], seeds: Iterable[int]) -> list[Job]:
            cells = [Cell(name, net, split) for net in nets for split in splits for name in names]
            return [Job(cell, seed, chosen[cell.net]) for cell in cells for seed in seeds]

        carry_out(jobs_of(REFERENCES, SEEDS))
        others = [name for name in methods if name not in REFERENCES]
        carry_out(jobs_of(others, SEEDS[:1]))
        first = [judge(cell, scores) for cell in dict.fromkeys(cell for cell, _ in scores)]
        doubtful = [v.cell for v in first if v.kind in ("below", "below, documented")]
        carry_out([Job(cell, seed, chosen[cell.net]) for cell in doubtful for seed in SEEDS[1:]])
    wanted = {*methods, *REFERENCES}
    cells = sorted({cell for cell, _ in scores if cell.method in wanted})
    return chosen, [judge(cell, scores) for cell in cells]
