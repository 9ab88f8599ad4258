"""Runs the soundness battery and writes results/soundness: soundness.json and the table in README.md.

python -m fedskew.report.soundness                                   all of it; run it again to resume
python -m fedskew.report.soundness --methods fedmr,feddyn --nets mlp   a part, printed and not written
python -m fedskew.report.soundness --methods fedmr --update            a part, written in place of the same cells
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fedskew.core.files import write_atomically
from fedskew.core.settings import UsageError, choose
from fedskew.methods import REGISTRY
from fedskew.report.results import grid
from fedskew.studies.soundness import NETS, RATES, SEEDS, SPLITS, Regime, run_battery
from fedskew.studies.soundness_verdict import KINDS, LAST, REFERENCES, Verdict

SOUND = ("ok", "reference", "below, documented")
OPEN = "no verdict"


def described(regime: Regime) -> str:
    """A line of the introduction: how a net is trained."""
    rounds, side = ", ".join(str(regime.rounds[split]) for split in SPLITS), 8 * regime.enlarge
    clipped = f", gradients clipped at {regime.clip:g}" if regime.clip else ""
    return f"{regime.model} {rounds} rounds, batches of {regime.batch}, {side} x {side}{clipped}"


INTRODUCTION = f"""# Soundness battery

Every method with its **defaults**, beside FedAvg: does a default surprise its user? Made by `make sound`, with
1,000 of scikit-learn's digits, 5 clients, 2 epochs a round, plain SGD whose learning rate falls to zero by a cosine, so
that curves settle. Rounds ({", ".join(SPLITS)}), batch and image size:
{"; ".join(described(r) for r in NETS.values())}.
Each split is drawn once, the same for all seeds, which differ by the initial model, the batches and the samples that
clients hold out: else the noise is that of the splits. FedAvg's learning rate is the best of
{", ".join(map(str, RATES))} on validation data of the split `two` for each net; all methods use it.
Figures are the mean of the last {LAST} rounds, in %: the global model on the test set, or for methods without one (*)
the personal models on the clients' test parts, beside training alone (`local`) instead of FedAvg. Methods that need a
public set are compared with FedAvg on the same split (`fedavg-public`). One seed; {len(SEEDS)} where it looks weak.

**Bold**: diverged, at chance, or more than the noise below the reference without a reason on the method's page
(docs/methods.md). d: below, with a reason. ?: no verdict, because the reference is half-trained or still rises: being
below it could only mean being slower. The noise is two standard errors of the difference, from the reference's own
seeds on the nets where it has converged.
"""


def mark(verdict: Verdict) -> str:
    """A cell of the table.

    >>> from fedskew.studies.soundness_verdict import Cell
    >>> mark(Verdict(Cell("fedmr", "mlp", "iid"), "at chance", 0.1, 0.9, 0.02, 1))
    '**10.0 at chance**'
    """
    figure = "" if verdict.accuracy is None else f"{100 * verdict.accuracy:.1f}"
    if verdict.kind == "below, documented":
        return f"{figure} d"
    if verdict.kind == OPEN:
        return f"{figure} ?"
    return figure if verdict.kind in SOUND else f"**{figure} {verdict.kind}**".replace("** ", "**")


def markdown(rates: dict[str, float], verdicts: Sequence[Verdict]) -> str:
    """The page: a row per method, a column per net and split, then what is wrong and what is explained."""
    places = {v.cell.net: 0 for v in verdicts}, {v.cell.split: 0 for v in verdicts}
    columns = [(net, split) for net in NETS if net in places[0] for split in SPLITS if split in places[1]]
    found = {(v.cell.method, v.cell.net, v.cell.split): v for v in verdicts}
    names = [name for name in KINDS if any(v.cell.method == name for v in verdicts)]
    rows = [["method", *(f"{net} {split}" for net, split in columns)]]
    for name in sorted(names, key=lambda name: name not in REFERENCES):
        title = name + ("" if KINDS[name].has_global else " *")
        rows.append([title, *(mark(found[name, *c]) if (name, *c) in found else "" for c in columns)])
    noise = {v.cell.split: v.noise for v in verdicts if v.kind == "ok" and v.seeds == 1}
    lines = [
        INTRODUCTION,
        f"Learning rates: {', '.join(f'{net} {rate:g}' for net, rate in rates.items())}.",
        f"Noise with one seed, in points: {', '.join(f'{s} {100 * value:.1f}' for s, value in noise.items())}.",
        "",
        grid(rows),
        "",
        *findings(verdicts),
    ]
    return "\n".join(lines) + "\n"


def findings(verdicts: Sequence[Verdict]) -> list[str]:
    """What is not sound, cell by cell, where there is no verdict, and the reasons for what is below and documented."""
    bad = [v for v in verdicts if v.kind not in (*SOUND, OPEN)]
    open_cells = {(v.cell.net, v.cell.split, v.reason): 0 for v in verdicts if v.kind == OPEN}
    lines = ["## Not sound", ""]
    for v in bad:
        beside = (
            "" if v.accuracy is None or v.reference is None else f", {100 * (v.accuracy - v.reference):+.1f} points"
        )
        lines.append(f"- {v.cell.method}, {v.cell.net}, {v.cell.split}: {v.reason or v.kind}{beside}, {v.seeds} seeds")
    reasons = {(v.cell.method, v.reason): 0 for v in verdicts if v.kind == "below, documented"}
    lines += [] if bad else ["Nothing."]
    lines += ["", "## No verdict", "", *([f"- {net}, {split}: {why}" for net, split, why in open_cells] or ["None."])]
    return [*lines, "", "## Below, with a reason", "", *([f"- {m}: {why}" for m, why in reasons] or ["Nothing."])]


def write(folder: Path, rates: dict[str, float], verdicts: Sequence[Verdict]) -> None:
    """Write soundness.json and README.md."""
    folder.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.encode({"rates": rates, "verdicts": list(verdicts)})
    write_atomically(folder / "soundness.json", msgspec.json.format(content, indent=1) + b"\n")
    write_atomically(folder / "README.md", markdown(rates, verdicts).encode())


class Written(msgspec.Struct, frozen=True):
    """What soundness.json holds."""

    rates: dict[str, float]
    verdicts: list[Verdict]


def updated(folder: Path, methods: Sequence[str], verdicts: Sequence[Verdict]) -> Written:
    """The written table with these verdicts of some methods in place of the same cells; all others stay."""
    old = msgspec.json.decode((folder / "soundness.json").read_bytes(), type=Written)
    new = {v.cell: v for v in verdicts if v.cell.method in methods}
    kept = {v.cell: v for v in old.verdicts}
    return Written(old.rates, [value for _, value in sorted((kept | new).items())])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the battery. Returns 1 if a cell is not sound. A part is printed, and written only with --update."""
    parser = argparse.ArgumentParser(prog="python -m fedskew.report.soundness", description=main.__doc__)
    for name, known in (("methods", REGISTRY), ("nets", NETS), ("splits", SPLITS)):
        parser.add_argument(f"--{name}", default="", help=f"some of {', '.join(known)}, separated by commas")
    parser.add_argument("--out", type=Path, default=Path("runs/soundness"), help="folder of the runs")
    parser.add_argument("--results", type=Path, default=Path("results/soundness"), help="folder of the table")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--update", action="store_true", help="write the cells of --methods into the table")
    given = parser.parse_args(arguments)
    try:
        methods, nets, splits = (
            [name for name in text.split(",") if name and choose(word, name, known)] or list(known)
            for text, word, known in (
                (given.methods, "method", REGISTRY),
                (given.nets, "net", NETS),
                (given.splits, "split", SPLITS),
            )
        )
    except UsageError as error:
        parser.error(str(error))
    rates, verdicts = run_battery(
        given.out,
        methods=methods,
        nets=nets,
        splits=splits,
        workers=given.workers,
        say=lambda text: print(text, flush=True),
    )
    if given.update:
        written = updated(given.results, methods, verdicts)
        if any(written.rates[net] != rate for net, rate in rates.items()):
            parser.error(f"the learning rates are {rates}, but those of the table {written.rates}")
        write(given.results, written.rates, written.verdicts)
    elif given.methods or given.nets or given.splits:
        print(markdown(rates, verdicts))
    else:
        write(given.results, rates, verdicts)
        print(f"written to {given.results}")
    bad, unknown = sum(v.kind not in (*SOUND, OPEN) for v in verdicts), sum(v.kind == OPEN for v in verdicts)
    print(f"{len(verdicts)} cells, {bad} not sound, {unknown} without a verdict")
    return int(bad > 0)


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        print("interrupted; the same command resumes", file=sys.stderr)
        raise SystemExit(130) from None
