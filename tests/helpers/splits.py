"""Labels to partition, and readings of a partition, for the tests of splits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from fedskew.data.split.partition import Partition

Labels = npt.NDArray[Any]
quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
CIFAR10 = np.repeat(np.arange(10), 5000)
CIFAR100 = np.repeat(np.arange(100), 500)
MNIST = np.repeat(np.arange(10), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])


def balanced(classes: int, each: int) -> Labels:
    return np.repeat(np.arange(classes), each)


def table(partition: Partition, y: Labels) -> npt.NDArray[np.int64]:
    labels = np.unique(y)
    return np.array([[(y[samples] == label).sum() for label in labels] for samples in partition.clients])


def sizes(partition: Partition) -> list[int]:
    return [len(samples) for samples in partition.clients]


def left_over(partition: Partition) -> int:
    return sum(int(note.split()[0]) for note in partition.notes if "left" in note)


@st.composite
def labels(draw: st.DrawFn, least: int = 12) -> Labels:
    """One to six classes of 12 to 40 samples each, in any order, named by any numbers."""
    names = draw(st.lists(st.integers(0, 50), min_size=1, max_size=6, unique=True))
    counts = draw(st.lists(st.integers(least, 40), min_size=len(names), max_size=len(names)))
    return np.random.RandomState(draw(st.integers(0, 9))).permutation(np.repeat(names, counts))
