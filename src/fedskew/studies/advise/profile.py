"""How skewed the clients are: the figures of an experiment's split, and what is needed to draw it."""

from __future__ import annotations

import msgspec
import numpy as np

from fedskew.data.split.skew import skew
from fedskew.experiment.assemble import Assembled
from fedskew.experiment.skewness import skew_figures


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One experiment's clients."""

    figures: dict[str, float | None]  # see experiment/skewness.py
    table: list[list[int]]  # samples by client and class
    labels: list[str]  # names of the classes
    clients: list[str]  # names of the clients
    public: int  # samples on the server
    notes: list[str] = []  # of the split and the table

    @property
    def samples(self) -> list[int]:
        """All clients' samples by class."""
        return [sum(of) for of in zip(*self.table, strict=True)]

    @property
    def sentence(self) -> str:
        """Size and skew in two sentences.

        >>> figures = {"total_variation": 0.5, "empty_cells": 0.5, "size_gini": 0.0, "imbalance_factor": 1.0}
        >>> Profile(figures=figures, table=[[2, 0], [0, 2]], labels=["a", "b"], clients=["0", "1"], public=0).sentence
        '2 clients of 2 to 2 samples, 2 classes. Label skew: total variation 0.50 to the mix of all, 50 % of (client, \
class) cells empty; sizes: Gini 0.00; classes: the largest has 1.0 times the samples of the smallest.'
        """
        sizes = np.array(self.table).sum(axis=1)
        found = self.figures
        features = found.get("features")
        return (
            f"{len(sizes)} clients of {sizes.min():,} to {sizes.max():,} samples, {len(self.labels)} classes. "
            f"Label skew: total variation {found['total_variation']:.2f} to the mix of all, "
            f"{100 * (found['empty_cells'] or 0):.0f} % of (client, class) cells empty; sizes: Gini "
            f"{found['size_gini']:.2f}; classes: the largest has {found['imbalance_factor']:.1f} times the samples of "
            "the smallest" + (f"; feature skew {features:.2f}." if features is not None else ".")
        )


def profile_of(assembled: Assembled) -> Profile:
    """The profile of an experiment that is ready to run."""
    table = skew(assembled.partition, assembled.data.y_train, assembled.data.classes).table
    return Profile(
        figures=skew_figures(assembled),
        table=table.tolist(),
        labels=list(assembled.labels),
        clients=list(assembled.owners) or [str(c) for c in range(len(table))],
        public=len(assembled.partition.public),
        notes=list(assembled.notes),
    )
