"""Norms of updates, and which of them are far beyond the others of their round.

A client that sends 1e30 times its update, by a fault or on purpose, would decide the mean alone. Honest updates differ,
since clients have different data and sample counts, so the bound is generous: a factor of the round's median.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from fedskew.core.tensors import Payload

Norms = Mapping[str, float]  # by group of a payload


def norms_of(payload: Payload) -> dict[str, float]:
    """The Euclidean norm of each group, over all its tensors."""
    return {group: math.sqrt(sum(_square(t) for t in tensors.values())) for group, tensors in payload.items()}


def _square(t: torch.Tensor) -> float:
    if not t.is_floating_point():
        t = t.double()
    return float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2


def outliers(norms: Mapping[int, Norms], broadcast: Norms, factor: float) -> dict[int, str]:
    """Client -> why its update is refused: in some group its norm is more than `factor` times the usual one.

    The usual one is the median over the round's clients (the lower one of two, zeros left out), or the norm of the same
    group in the broadcast if that is larger: so that with few clients a tiny update does not make the others
    outliers. Nothing is refused for factor 0, or in a group with nothing to compare with.

    >>> outliers({0: {"parameters": 2.0}, 1: {"parameters": 3e9}, 2: {"parameters": 4.0}}, {}, 100)
    {1: 'sent parameters of norm 3e+09, more than 100 times the usual 4'}
    """
    refused: dict[int, str] = {}
    for group in dict.fromkeys(group for own in norms.values() for group in own) if factor else ():
        values = sorted(own[group] for own in norms.values() if own.get(group, 0.0) > 0)
        others = len(values) > 1
        usual = max(values[(len(values) - 1) // 2] if others else 0.0, broadcast.get(group, 0.0))
        for client, own in norms.items():
            if usual and own.get(group, 0.0) > factor * usual:
                refused[client] = (
                    f"sent {group} of norm {own[group]:.3g}, more than {factor:g} times the usual {usual:.3g}"
                )
    return refused
