"""Verdicts of the soundness battery: which methods end below FedAvg, by more than the noise, without a reason."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Literal

import msgspec

from fedskew.core.method import Method
from fedskew.methods import REGISTRY
from fedskew.studies.convergence import unsettled_curve

BESIDE_PUBLIC = "fedavg-public"  # FedAvg on the split of such a method: other samples are left for the clients
REFERENCES = ("fedavg", BESIDE_PUBLIC, "local")
KINDS: dict[str, type[Method]] = {**REGISTRY, BESIDE_PUBLIC: REGISTRY["fedavg"]}
LAST = 3  # accuracies are the mean of the last three rounds
CLASSES, AT_CHANCE = 10, 0.15
TRAINED = 0.6  # a reference below it is half-trained: all samples together give more than 0.95 with every net
FLOOR = 0.02  # the least noise: 360 test samples have a standard error of 0.016 at 90 %

Kind = Literal["ok", "reference", "below, documented", "below", "no verdict", "at chance", "diverged", "failed"]


class Cell(msgspec.Struct, frozen=True, order=True):
    """One method on one net and split."""

    method: str
    net: str
    split: str


class Score(msgspec.Struct, frozen=True):
    """What became of one run."""

    accuracy: float | None  # mean of the last rounds; None: the run diverged
    failed: str = ""  # why it has none
    curve: tuple[float, ...] = ()  # the accuracy of every round


class Verdict(msgspec.Struct, frozen=True):
    """The judgement of one cell."""

    cell: Cell
    kind: Kind
    accuracy: float | None  # mean over seeds
    reference: float | None  # that of FedAvg (or of local training) with the same seeds
    noise: float  # what two means over these seeds may differ by
    seeds: int
    reason: str = ""  # why it diverged or has no verdict, or what the method's page says about being below


Scores = dict[tuple[Cell, int], Score]


def reference_of(kind: type[Method]) -> str:
    """What a method must not end below: FedAvg's global model, or for methods without one training alone."""
    if not kind.has_global:
        return "local"
    return BESIDE_PUBLIC if kind.public else "fedavg"


def noise(cell: Cell, reference: str, scores: Scores, seeds: int) -> float:
    """What the mean over `seeds` seeds may be below the reference's by chance: two standard errors of the difference.

    The standard deviation is that of the reference's seeds on this split, pooled over the nets where it has converged:
    a half-trained net varies by far more, and would hide what is wrong on the others.
    """
    by_net: dict[str, list[float]] = {}
    for (other, _), score in scores.items():
        if other.method != reference or other.split != cell.split or score.accuracy is None:
            continue
        if other.net == cell.net or not unsettled(other, scores):
            by_net.setdefault(other.net, []).append(score.accuracy)
    variances = [statistics.variance(values) for values in by_net.values() if len(values) > 1]
    deviation = math.sqrt(statistics.mean(variances)) if variances else 0.0
    return max(FLOOR, 2 * deviation * math.sqrt(2 / seeds))


def unsettled(reference: Cell, scores: Scores) -> str:
    """Why nothing can be compared with this cell of FedAvg or local training, in words; "" if it can.

    From the mean over seeds of its curves: it is half-trained, or still rises.
    """
    curves = [score.curve for (other, _), score in scores.items() if other == reference and score.curve]
    curve = [statistics.mean(values) for values in zip(*curves, strict=True)]
    why = unsettled_curve(curve, CLASSES)
    if not why and statistics.mean(curve[-LAST:]) < TRAINED:
        why = f"ends at {100 * statistics.mean(curve[-LAST:]):.1f} %, half-trained"
    return f"{reference.method} {why}" if why else ""


def judge(cell: Cell, scores: Scores, kinds: Mapping[str, type[Method]] = KINDS) -> Verdict:
    """The verdict on one cell, from the seeds it was run with.

    A method that diverges or ends at chance is never sound. Where the reference has not converged there is no verdict.
    A cell more than the noise below its reference is documented if the method declares a reason for it in
    `Method.weak_where`: for net and split ("mlp two"), its net, its split or "everywhere".
    """
    kind = kinds[cell.method]
    reference = cell.method if cell.method in REFERENCES else reference_of(kind)
    own = {seed: score for (other, seed), score in scores.items() if other == cell}
    if failed := next((score.failed for score in own.values() if score.accuracy is None), ""):
        return Verdict(cell, "diverged" if "diverged" in failed else "failed", None, None, 0.0, len(own), failed)
    other = msgspec.structs.replace(cell, method=reference)
    beside = [scores[other, seed].accuracy for seed in own if (other, seed) in scores]
    accuracy = statistics.mean(score.accuracy or 0.0 for score in own.values())
    base = statistics.mean(value or 0.0 for value in beside) if beside else None
    margin = noise(cell, reference, scores, len(own))

    def verdict(kind: Kind, reason: str = "") -> Verdict:
        return Verdict(cell, kind, accuracy, base, margin, len(own), reason)

    if accuracy < AT_CHANCE:
        return verdict("at chance")
    if why := unsettled(other, scores):
        return verdict("no verdict", why)
    if cell.method == reference:
        return verdict("reference")
    if base is None or accuracy >= base - margin:
        return verdict("ok")
    keys = (f"{cell.net} {cell.split}", cell.net, cell.split, "everywhere")
    reason = next((kind.weak_where[key] for key in keys if key in kind.weak_where), "")
    return verdict("below, documented" if reason else "below", reason)
