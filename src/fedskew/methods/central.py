"""Central: one client holds the training data of all. The control that shows what federation costs.

In each round it trains as many epochs as a client would, over all samples: as long as all clients together.
"""

from dataclasses import dataclass

from fedskew.core.method import Method


@dataclass(frozen=True)
class Central(Method):
    """Control without a split: one client holds the training data of all."""

    formula = r"x \leftarrow \underset{w}{\mathrm{argmin}} \; \frac{1}{n} \sum_i n_i f_i(w)"
    terms_off = {}  # on data that are split it is FedAvg; the experiment pools them
    pooled = True
