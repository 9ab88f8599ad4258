"""Claims of the papers beside what we measured: finished runs kept as small files, and a verdict on each claim.

A run that was made to check a claim is kept as a `Cell`, a JSON file with its curve, its settings, the commit and the
digest. claims.toml lists the claims and names the cells that test them. `judge` gives the verdicts; no verdict is given
where the baseline has not converged.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fedskew.core.files import write_atomically
from fedskew.core.settings import UsageError
from fedskew.evaluation.figures import ACCURACIES, FIGURES
from fedskew.experiment.config import read_toml
from fedskew.experiment.run_directory import read_run, versions
from fedskew.studies.convergence import LAST, last_mean, unsettled_curve
from fedskew.studies.ranking import margin

SCHEMA = 1
Curve = Sequence[tuple[int, float]]  # (round from 1, percent), one entry per evaluation
FAR_OFF = 3.0  # points between our baseline and the paper's, at its scale, from which it is said beside the verdict
HALF = 0.5  # a gain of at least this share of the paper's is reproduced


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One finished run that a claim rests on."""

    name: str
    method: str
    seed: int
    command: str  # that makes it again
    commit: str
    date: str
    cpu: str
    versions: dict[str, str]
    digest: str
    model_digest: str
    rounds: int
    seconds: float  # of computing, clients and server together
    classes: int
    settings: dict[str, Any]
    curves: dict[str, list[tuple[int, float]]]  # accuracy -> (round from 1, percent), one entry per evaluation
    schema: int = SCHEMA


def cell_of(run: Path, *, name: str, command: str, commit: str, cpu: str) -> Cell:
    """The finished run in a folder as a cell. `commit` and `cpu` are the run's; the folder does not say them."""
    saved = read_run(run)
    if saved.result is None or not saved.result.digest:
        raise UsageError(f"{run} is not finished: `fedskew run --resume {run}` finishes it.")
    evaluated = [record for record in saved.records if record.metrics is not None]
    curves = {
        key: [(r.number, round(100 * value, 3)) for r in evaluated if (value := FIGURES[key].read(r)) is not None]
        for key in ACCURACIES
    }
    last = evaluated[-1].metrics
    return Cell(
        name=name,
        method=saved.result.method,
        seed=saved.result.seed,
        command=command,
        commit=commit,
        date=time.strftime("%Y-%m-%d"),
        cpu=cpu,
        versions=versions(),
        digest=saved.result.digest,
        model_digest=saved.result.model_digest,
        rounds=saved.result.rounds,
        seconds=round(saved.result.client_seconds + saved.result.server_seconds, 1),
        classes=last.classes if last else 0,
        settings=saved.result.settings,
        curves={key: curve for key, curve in curves.items() if curve},
    )


def write_cell(cell: Cell, folder: Path) -> Path:
    """Write a cell to <folder>/<name>.json."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{cell.name}.json"
    write_atomically(path, msgspec.json.format(msgspec.json.encode(cell), indent=0) + b"\n")
    return path


def read_cells(folder: Path) -> dict[str, Cell]:
    """The cells of a folder, by name."""
    try:
        cells = [msgspec.json.decode(path.read_bytes(), type=Cell) for path in sorted(folder.glob("*.json"))]
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{folder} holds a file that is not a kept run: {error}.") from None
    return {cell.name: cell for cell in cells}


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One claim of a paper: a method is ahead of a baseline by so much."""

    where: str  # table or section
    claim: str  # in words
    paper: tuple[float, float] | None = (
        None  # the paper's values: of the method and of the baseline; None: in words only
    )
    method: list[str] = []  # cells of the method, one per seed; empty: nothing was run
    baseline: list[str] = []  # cells of the baseline with the same seeds, in the same order
    figure: str = "global"  # of the method; a key of evaluation.figures.ACCURACIES
    baseline_figure: str = ""  # of the baseline, if it is another one
    last_five: bool = False  # compare means of the last five evaluations instead of the last round
    rounds: bool = False  # compare the rounds until the baseline's final accuracy is reached; fewer is ahead
    controls: dict[str, list[str]] = {}  # further columns, by their words: cells, one per seed
    scale: str = ""  # what is smaller than in the paper; "": nothing, so the baseline need not be flat
    untested: str = ""  # why nothing was run, or why what was run cannot decide
    note: str = ""


class PaperClaims(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The claims of one paper, and the readings and settings that were tried where one was not reproduced."""

    title: str
    method: str
    setting: str  # of the runs, in words
    attempts: list[str] = []
    curves: list[str] = []  # cells to draw
    figure: str = "global"  # what is drawn
    claims: list[Claim]


def read_claims(path: Path) -> dict[str, PaperClaims]:
    """The claims file, by paper."""
    try:
        return msgspec.convert(read_toml(path), dict[str, PaperClaims])
    except msgspec.ValidationError as error:
        raise UsageError(f"{path} is not a list of claims: {error}.") from None


class Judged(NamedTuple):
    """A claim with what was measured, in percent and points."""

    claim: Claim
    verdict: str  # reproduced | direction only | not reproduced | cannot be tested | not run
    why: str  # in a few words
    ours: tuple[float, float] | None  # method and baseline, means over seeds
    gain: float | None
    margin: float | None  # half the width of the gain's 95 % interval; with one seed, of the noise between rounds
    seeds: int
    controls: dict[str, float]


def judge(claim: Claim, cells: Mapping[str, Cell]) -> Judged:
    """The verdict on one claim.

    Reproduced: the gain has the paper's sign, is larger than the noise, and is at least half the paper's. Direction
    only: it is larger than the noise but smaller than half. Where the paper has a tie (less than half a point), ours
    must be one too. The noise is the 95 % interval of paired differences over seeds; with one seed it is twice the
    standard deviation of the baseline's and the method's last five evaluations.
    """
    names = [*claim.method, *claim.baseline, *(name for group in claim.controls.values() for name in group)]
    missing = [name for name in names if name not in cells]
    if not claim.method or missing:
        why = claim.untested or ("waits for " + ", ".join(missing) if missing else "")
        return Judged(claim, "cannot be tested" if claim.untested else "not run", why, None, None, None, 0, {})
    figures = claim.figure, claim.baseline_figure or claim.figure
    if claim.rounds:
        pairs = list(zip(claim.method, claim.baseline, strict=True))
        method = [
            rounds_to_level(_curve(cells[name], figures[0]), _curve(cells[base], figures[1])) for name, base in pairs
        ]
        baseline = [float(cells[name].rounds) for name in claim.baseline]
    else:
        method, baseline = (
            [_value(cells[name], figure, claim.last_five) for name in group]
            for group, figure in zip((claim.method, claim.baseline), figures, strict=True)
        )
    differences = [a - b for a, b in zip(method, baseline, strict=True)]
    gain, margin = statistics.mean(differences), _margin(claim, cells, differences, figures)
    controls = {
        words: statistics.mean(_value(cells[name], claim.figure, claim.last_five) for name in group)
        for words, group in claim.controls.items()
    }
    ours = statistics.mean(method), statistics.mean(baseline)
    verdict, why = _verdict(claim, cells, gain, margin, figures[1])
    if claim.paper is not None and not claim.scale and abs(off := ours[1] - claim.paper[1]) > FAR_OFF:
        why += f"; our baseline ends {abs(off):.1f} points {'above' if off > 0 else 'below'} the paper's"
    return Judged(claim, verdict, why, ours, gain, margin, len(method), controls)


def _verdict(claim: Claim, cells: Mapping[str, Cell], gain: float, margin: float, figure: str) -> tuple[str, str]:
    if claim.untested:
        return "cannot be tested", claim.untested
    base = [cells[name] for name in claim.baseline]
    curves = [[value / 100 for _, value in _curve(cell, figure)] for cell in base]
    over_seeds = [statistics.mean(at) for at in zip(*curves, strict=False)]  # one seed's swings are no trend
    if why := unsettled_curve(over_seeds, base[0].classes, may_rise=not claim.scale):
        return "cannot be tested", f"the baseline {why}"
    paper = None if claim.paper is None else claim.paper[0] - claim.paper[1]
    if paper is not None and abs(paper) < 0.5:
        tie = abs(gain) <= max(margin, 1.0)
        return ("reproduced", "a tie in both") if tie else ("not reproduced", "a tie in the paper")
    wanted = gain if (not claim.rounds if paper is None else paper > 0) else -gain
    if wanted <= margin:
        return "not reproduced", "no larger than the noise" if abs(gain) <= margin else "the other way round"
    if paper is None:
        return "reproduced", "in direction; the paper gives no number"
    if wanted < HALF * abs(paper):
        return "direction only", "less than half of the paper's gain"
    return "reproduced", f"within {abs(gain - paper):.1f} {'rounds' if claim.rounds else 'points'} of the paper's gain"


def rounds_to_level(curve: Curve, baseline: Curve) -> float:
    """The first round at which a run is at the final level of another; one evaluation past its end if it never is.

    The level is the mean of the other's last five evaluations. A run is at it when the mean of that evaluation and the
    four after it is: a single lucky evaluation does not count.

    >>> rounds_to_level([(10, 40.0), (20, 71.0), (30, 70.0), (40, 70.0), (50, 70.0), (60, 70.0)], [(60, 70.0)])
    20.0
    """
    level = last_mean([value for _, value in baseline])
    values = [value for _, value in curve]
    for i in range(max(1, len(curve) - LAST + 1)):
        if statistics.mean(values[i : i + LAST]) >= level:
            return float(curve[i][0])
    return float(curve[-1][0] + _spacing(curve))


def _spacing(curve: Curve) -> int:
    """Rounds between the last two evaluations."""
    return curve[-1][0] - curve[-2][0] if len(curve) > 1 else curve[-1][0]


def _curve(cell: Cell, figure: str) -> Curve:
    if not (curve := cell.curves.get(figure)):
        raise UsageError(f"{cell.name} has no figure '{figure}'; it has {', '.join(cell.curves)}.")
    return curve


def _value(cell: Cell, figure: str, last_five: bool) -> float:
    values = [value for _, value in _curve(cell, figure)]
    return last_mean(values) if last_five else values[-1]


def _margin(claim: Claim, cells: Mapping[str, Cell], differences: Sequence[float], figures: tuple[str, str]) -> float:
    over_seeds = margin(differences)
    if over_seeds is not None:
        return over_seeds
    if claim.rounds:
        return float(_spacing(_curve(cells[claim.method[0]], figures[0])))
    tails = [
        [value for _, value in cells[group[0]].curves[figure][-LAST:]]
        for group, figure in zip((claim.method, claim.baseline), figures, strict=True)
    ]
    return 2 * math.sqrt(sum(statistics.variance(tail) for tail in tails if len(tail) > 1))
