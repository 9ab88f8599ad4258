"""Predictions beside the classes that samples have, where these are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fedskew.core.settings import UsageError
from fedskew.data.dataset import number_of
from fedskew.data.table import canonical
from fedskew.evaluation.metrics import ModelMetrics
from fedskew.evaluation.scores import class_figures
from fedskew.experiment.use import Predictions


def scored(predictions: Predictions, labels: Sequence[str] | None, *, folders: bool = False) -> ModelMetrics | None:
    """How many samples of each class were found, and the figures that follow; None if the classes are not known.

    labels: the class of each sample as it is written; None: not known.
    folders: the labels are names of folders. If none of them is a class, the classes are not known.
    """
    if labels is None:
        return None
    numbers = class_numbers(labels, predictions.labels)
    if folders and not any(number is not None for number in numbers):
        return None  # images of patients, say, in a folder each
    if foreign := [label for label, number in zip(labels, numbers, strict=True) if number is None]:
        raise UsageError(
            f"the data have the class '{foreign[0]}', which the model does not know: "
            f"expected {', '.join(predictions.labels)}."
        )
    found: list[int] = predictions.numbers.tolist()
    hits = [number for number, one in zip(numbers, found, strict=True) if number == one]
    listed: tuple[Sequence[int | None], ...] = (hits, numbers, found)
    tallies = [Counter(each) for each in listed]
    right, total, said = ([tally[c] for c in range(len(predictions.labels))] for tally in tallies)
    return ModelMetrics(
        accuracy=sum(right) / len(found),
        loss=None,
        per_class=[r / t if t else None for r, t in zip(right, total, strict=True)],
        samples=total,
        predicted=said,
        **class_figures(right, total, said),
    )


def class_numbers(given: Sequence[str], names: Sequence[str]) -> list[int | None]:
    """The number of each class that is given by name; None if the model has no such class.

    Classes whose names are words may also be given by number, if all are: the first class is 0.
    """
    place = {canonical(name): number for number, name in enumerate(names)}
    place |= {name: number for number, name in enumerate(names)}
    numbers = [place.get(label, place.get(canonical(label))) for label in given]
    if None in numbers and not any(number_of(name) is not None for name in names):
        by_number = {str(number): number for number in range(len(names))}
        if all(label in by_number for label in given):
            return [by_number[label] for label in given]
    return numbers
