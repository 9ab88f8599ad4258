"""Linear classifier heads: their name in a net, their initial values, and a deployed head beside the trained one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedskew.core.tensors import Payload, Tensors

HEAD = "head."  # prefix of the names of a net's head
TRAINED = "trained"  # group of the payload: the head that clients train, where another one is deployed


def last_linear(net: nn.Module) -> str:
    """The name of the last linear layer, which makes the logits."""
    names: list[str] = [name for name, part in net.named_modules() if isinstance(part, nn.Linear)]
    return names[-1]


def linear_start(shape: tuple[int, ...], features: int, rng: torch.Generator) -> Tensor:
    """Initial weights or biases of a linear layer with `features` inputs, uniform in +-features^-1/2."""
    unit: Tensor = torch.rand(shape, generator=rng) * 2 - 1
    return unit / float(features**0.5)


def deploy_head(model: Payload, prefix: str, head: Tensors) -> Payload:
    """The model with `head` in place of its own. Its own entries under `prefix` go to the group TRAINED."""
    trained = model["parameters"].split(prefix)[1]
    return model | {"parameters": model["parameters"] | head, TRAINED: trained}


def as_trained(payload: Payload) -> Payload:
    """The inverse of `deploy_head`: the payload with the head that clients train in place of the deployed one."""
    return payload | {"parameters": payload["parameters"] | payload.get(TRAINED, Tensors())}
