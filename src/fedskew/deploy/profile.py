"""Label counts of real sites (`serve --profile`): what a site tells of them, and how skewed the sites are by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedskew.data.split.skew import gini_coefficient, skew_of

Counts = Mapping[str, int]  # class name -> training samples


def told_counts(y: npt.NDArray[Any], classes: int, least: int) -> tuple[int, ...]:
    """Samples by class as a site tells them: 0 for a class with fewer than `least`.

    The server knows how many samples there are in all, so it could compute a single count that is missing. So either
    none is kept back, or at least two with `least` samples together: if need be, the next smallest class is told as 0.

    >>> told_counts(np.repeat([0, 1, 2], [50, 20, 3]), 3, least=5)
    (50, 0, 0)
    >>> told_counts(np.repeat([0, 1, 2], [50, 4, 3]), 4, least=5)
    (50, 0, 0, 0)
    """
    counts = np.bincount(y, minlength=classes)
    told = np.where(counts < least, 0, counts)
    while told.any():
        hidden = (counts - told)[counts > told]
        if not len(hidden) or (len(hidden) > 1 and hidden.sum() >= least):
            break
        told[told == told[told > 0].min()] = 0
    return tuple(told.tolist())


def skew_between(
    labels: Sequence[str], counts: Mapping[str, Counts], samples: Mapping[str, int]
) -> dict[str, float | None]:
    """The figures of `Skew.summary` from the label counts that sites told (site -> counts); {} if fewer than two did.

    `labels` are the classes of the run, `samples` the training samples by site. Besides: `sites`, how many there are,
    and `withheld`, the share of samples in classes that were not told, at the sites that told the others.
    """
    rows = {name: [told.get(label, 0) for label in labels] for name, told in sorted(counts.items())}
    rows = {name: row for name, row in rows.items() if any(row) and name in samples}
    if len(rows) < 2:
        return {}
    table, sizes = np.array(list(rows.values()), np.int64), np.array([samples[name] for name in rows], np.int64)
    told: dict[str, float | None] = dict(skew_of(table).summary())
    return told | {
        "size_gini": gini_coefficient(sizes),
        "sites": len(samples),
        "withheld": float(1 - table.sum() / sizes.sum()),
    }


def told_table(labels: Sequence[str], sites: Sequence[str], counts: Mapping[str, Counts]) -> npt.NDArray[np.int64]:
    """Samples [sites, classes] as the sites told them; 0 where one told nothing.

    >>> told_table(["a", "b"], ["north", "south"], {"south": {"b": 7}}).tolist()
    [[0, 0], [0, 7]]
    """
    return np.array([[counts.get(site, {}).get(label, 0) for label in labels] for site in sites], np.int64)


def describe(figures: Mapping[str, float | None], silent: Sequence[str]) -> str:
    """One line for the operator: the figures of `skew_between`, and the sites that told no counts."""
    kept = f"; {', '.join(silent)} told none" if silent else ""
    if not figures:
        return f"label counts: fewer than two sites told theirs{kept}"
    value = {name: figure or 0.0 for name, figure in figures.items()}
    return (
        f"label counts of {value['clients']:.0f} of {value['sites']:.0f} sites: total variation "
        f"{value['total_variation']:.2f}, Hellinger {value['hellinger']:.2f}, Jensen-Shannon "
        f"{value['jensen_shannon']:.2f} to the pooled mix, {100 * value['empty_cells']:.0f} % of (site, class) cells "
        f"empty, {value['effective_classes']:.1f} effective classes, size Gini {value['size_gini']:.2f}, imbalance "
        f"factor {value['imbalance_factor']:.1f}; {100 * value['withheld']:.1f} % of samples in classes too small to "
        f"be told{kept}"
    )
