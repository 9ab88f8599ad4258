"""What skew does to a model beyond its accuracy: collapsed features, heads that drift apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedskew.models.net import Net
from fedskew.site import Data
from fedskew.tensors import Payload

EPSILON = 1e-8  # added to variances: a dead feature correlates with nothing


def eigenvalues(features: Tensor) -> Tensor:
    """Of the correlation matrix of features [n, d], largest first; [d], zeros where n <= d leaves none."""
    n, d = features.shape
    x = features.double()
    x = (x - x.mean(0)) / (x.var(0) + EPSILON).sqrt() / (n - 1) ** 0.5
    small = x @ x.T if n < d else x.T @ x  # both have the same non-zero eigenvalues
    values = torch.linalg.eigvalsh(small).clamp(min=0).flip(0)
    return torch.cat([values, values.new_zeros(d - len(values))])


def eigenvalue_spread(features: Tensor, labels: Tensor, top: int = 50) -> float:
    """FedMR's Table 7: (1/n) sum over the `top` eigenvalues of (lambda - their mean)^2, n the batch; mean over classes.

    Large: features of a class move along few directions (collapse). Classes of one sample say nothing.
    """
    groups = [features[labels == c] for c in range(int(labels.max()) + 1)]
    leading = [eigenvalues(group)[:top] for group in groups if len(group) > 1]
    if not leading:
        return 0.0
    return float(torch.stack([(v - v.mean()).square().sum() for v in leading]).mean() / len(labels))


@torch.no_grad()
def feature_collapse(net: Net, data: Data, rng: torch.Generator, *, batch: int = 128, top: int = 50) -> float:
    """`eigenvalue_spread` of a net's features, mean over whole random batches (one smaller if there is none)."""
    net.eval()
    order = torch.randperm(len(data), generator=rng)
    whole = order[: len(order) // batch * batch] if len(order) >= batch else order
    spreads = []
    for positions in torch.split(whole, batch):
        x, y = data.take(positions)
        spreads.append(eigenvalue_spread(net.body(x), y, top))
    return sum(spreads) / len(spreads)


def head_distances(models: Sequence[Payload]) -> Tensor:
    """[models, models]: |w_i - w_j| over the parameters of the heads."""
    heads = [torch.cat([t.flatten().double() for t in m["parameters"].split("head.")[1].values()]) for m in models]
    stacked = torch.stack(heads)
    return torch.cdist(stacked, stacked, compute_mode="donot_use_mm_for_euclid_dist")
