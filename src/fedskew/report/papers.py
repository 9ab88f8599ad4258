"""The page "Reproducing the five papers": every claim with its verdict, our figures, commands and digests.

python -m fedskew.report.papers                     write docs/papers.md and its pictures from results/papers
python -m fedskew.report.papers run [WORD ...]      make the planned runs (results/papers/plan.toml) that are missing
python -m fedskew.report.papers keep RUN NAME --command "..." --commit C --cpu "..."      keep a finished run
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedskew.core.files import write_atomically
from fedskew.core.settings import UsageError
from fedskew.evaluation.figures import FIGURES
from fedskew.report.results import grid
from fedskew.studies.paper_runs import make_runs
from fedskew.studies.papers import Cell, Judged, PaperClaims, cell_of, judge, read_cells, read_claims, write_cell

RESULTS, PAGE, RUNS = Path("results/papers"), Path("docs/papers.md"), Path("runs/papers")
VERDICTS = ("reproduced", "direction only", "not reproduced", "cannot be tested", "not run")
INTRODUCTION = """# Reproducing the five papers

Generated from `results/papers` by `make results`; do not edit. Accuracies in percent, gains in points. *ours* is the
last round, never the best one; where the page says so, the mean of the last five evaluations.

A gain is **reproduced** if it has the paper's sign, is larger than the noise and at least half as large as the paper's;
**direction only** if it is smaller than that; **not reproduced** if it is not larger than the noise. It **cannot be
tested** where the data are not available, or where a reduced run's baseline, its mean over seeds, ends near chance or
still rises. The noise is the 95 % interval of the paired differences over seeds; with one seed, twice the standard
deviation between the last five evaluations. Claims on speed compare rounds: the first from which the mean of five
evaluations is at the baseline's final level, beside all rounds of the baseline. The rules are in
[papers.py](../src/fedskew/studies/papers.py).
"""


def page(papers: Mapping[str, PaperClaims], cells: Mapping[str, Cell], pictures: Mapping[str, str]) -> str:
    """The whole page as Markdown; `pictures` are paths of the papers' curves, by paper."""
    judged = {name: [judge(claim, cells) for claim in paper.claims] for name, paper in papers.items()}
    parts = [INTRODUCTION, grid(overview(judged))]
    for name, paper in papers.items():
        parts += [f"## {name}\n", f"{paper.title}. {paper.setting}\n", grid(claim_rows(judged[name]))]
        if name in pictures:
            parts.append(f"![Accuracy by round, {name}]({pictures[name]})\n")
        parts += [f"{i}. {text}" for i, text in enumerate(remarks(judged[name]), 1)] + [""]
        if paper.attempts:
            parts += [
                "What was tried where a claim was not reproduced:\n",
                *(f"- {text}" for text in paper.attempts),
                "",
            ]
    parts += ["## Runs\n", "Each is made again by its command, to the same digest on the same kind of CPU.\n"]
    return "\n".join([*parts, grid(run_rows(papers, cells))])


def overview(judged: Mapping[str, Sequence[Judged]]) -> list[list[str]]:
    """How many claims of each paper have which verdict."""
    rows = [["paper", "claims", *VERDICTS]]
    for name, found in judged.items():
        counts = Counter(each.verdict for each in found)
        rows.append([name, str(len(found)), *(str(counts[verdict] or "-") for verdict in VERDICTS)])
    return rows


def claim_rows(found: Sequence[Judged]) -> list[list[str]]:
    """One line per claim."""
    rows = [["", "where", "claim", "paper", "gain", "ours", "gain", "seeds", "verdict"]]
    for i, each in enumerate(found, 1):
        claim = each.claim
        paper = ["-", "-"] if claim.paper is None else [_pair(claim.paper), f"{claim.paper[0] - claim.paper[1]:+.1f}"]
        ours = ["-", "-", "-"]
        if each.ours is not None and each.gain is not None:
            ours = [_pair(each.ours), f"{each.gain:+.1f} ±{each.margin:.1f}", str(each.seeds)]
        verdict = f"**{each.verdict}**" + (f": {each.why}" if each.why else "")
        rows.append([str(i), claim.where, claim.claim, *paper, *ours, verdict])
    return rows


def remarks(found: Sequence[Judged]) -> list[str]:
    """What is reduced, the controls and notes, one line per claim."""
    lines = []
    for each in found:
        claim = each.claim
        controls = ", ".join(f"{words} {value:.1f}" for words, value in each.controls.items())
        parts = [
            f"Reduced: {claim.scale}." if claim.scale else "The paper's own scale." if claim.method else "",
            "Mean of the last five evaluations." if claim.last_five else "",
            "Rounds until the baseline's final accuracy." if claim.rounds else "",
            f"Controls: {controls}." if controls else "",
            claim.note,
        ]
        lines.append(" ".join(part for part in parts if part) or "-")
    return lines


def run_rows(papers: Mapping[str, PaperClaims], cells: Mapping[str, Cell]) -> list[list[str]]:
    """One line per run that is kept."""
    rows = [["run", "method", "seed", "command", "commit", "CPU", "core minutes", "digest"]]
    used = [name for paper in papers.values() for claim in paper.claims for name in (*claim.method, *claim.baseline)]
    order = {name: i for i, name in enumerate(dict.fromkeys(used))}
    for cell in sorted(cells.values(), key=lambda cell: (order.get(cell.name, len(order)), cell.name)):
        minutes = f"{cell.seconds / 60:.0f}" if cell.seconds >= 60 else f"{cell.seconds / 60:.1f}"
        shown = [cell.name, cell.method, str(cell.seed), f"`{cell.command}`", cell.commit[:10], cell.cpu, minutes]
        rows.append([*shown, cell.digest[:16]])
    return rows


def _pair(values: tuple[float, float]) -> str:
    return f"{values[0]:.1f} / {values[1]:.1f}"


def label_of(cell: Cell) -> str:
    """A run in a legend: its method with the settings in the command, and its seed."""
    given = re.search(r"--method (\S+)", cell.command)
    return f"{given[1] if given else cell.method}, seed {cell.seed}"


def draw(name: str, paper: PaperClaims, cells: Mapping[str, Cell], path: Path) -> bool:
    """Draw the curves of a paper as SVG; False if none of its cells is there yet."""
    chosen = [cells[cell] for cell in paper.curves if cell in cells and paper.figure in cells[cell].curves]
    if not chosen:
        return False
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "fedskew"  # the same file for the same curves
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for cell in chosen:
        rounds, values = zip(*cell.curves[paper.figure], strict=True)
        axes.plot(rounds, values, label=label_of(cell), linewidth=1.5)
    axes.set(xlabel="round", ylabel="accuracy (%)", title=f"{name}: {FIGURES[paper.figure].words}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True


def write_page(results: Path = RESULTS, target: Path = PAGE) -> None:
    """Write the page and its pictures."""
    papers, cells = read_claims(results / "claims.toml"), read_cells(results / "cells")
    pictures = {}
    for name, paper in papers.items():
        picture = target.parent / "papers" / f"{name.lower()}.svg"
        if draw(name, paper, cells, picture):
            pictures[name] = picture.relative_to(target.parent).as_posix()
    write_atomically(target, page(papers, cells, pictures).encode())


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of this module; see above."""
    parser = argparse.ArgumentParser(
        prog="python -m fedskew.report.papers", description="The page of the papers' claims."
    )
    commands = parser.add_subparsers(dest="command_name")
    keep = commands.add_parser("keep", help="keep a finished run as a cell")
    keep.add_argument("run", type=Path)
    keep.add_argument("name")
    for option in ("--command", "--commit", "--cpu"):
        keep.add_argument(option, required=True)
    run = commands.add_parser("run", help="make the planned runs that are missing; again to resume")
    run.add_argument("words", nargs="*", metavar="WORD", help="only runs whose name holds one of these")
    given = parser.parse_args(arguments)
    if given.command_name == "run":
        try:
            make_runs(RESULTS / "plan.toml", RESULTS / "cells", RUNS, words=given.words)
        except UsageError as error:
            parser.error(str(error))
    elif given.command_name == "keep":
        cell = cell_of(given.run, name=given.name, command=given.command, commit=given.commit, cpu=given.cpu)
        write_cell(cell, RESULTS / "cells")
    else:
        write_page()


if __name__ == "__main__":
    main()
