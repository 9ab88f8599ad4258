"""Training in bfloat16: the body of a net computes in it, everything else stays float32.

Parameters, gradients, batch-norm statistics and optimiser state are float32. Features leave the body as float32, so
the head, softmax, losses and whatever a method computes from features and logits are float32, too. Only `fit` uses
this: evaluation and frozen teachers are float32. The plain twin is `precision = "float32"`, the default.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

SLOW = (
    "training.precision=bf16 will be slow here: this CPU has no bfloat16 units (AVX512-BF16 or AMX), "
    "so they are emulated; float32 is faster and more exact."
)


class _Body:
    """Forward hooks that put autocast around one module."""

    def __init__(self, device: str) -> None:
        self.autocast = torch.autocast(device, dtype=torch.bfloat16)

    def enter(self, module: nn.Module, inputs: Any) -> None:
        self.autocast.__enter__()  # type: ignore[no-untyped-call]

    def leave(self, module: nn.Module, inputs: Any, output: Tensor | None) -> Tensor | None:
        self.autocast.__exit__(None, None, None)
        return None if output is None else output.float()  # None: the module raised an error


@contextmanager
def bf16_body(net: Any, device: str) -> Iterator[None]:
    """While it lasts, `net.body` computes in bfloat16 and returns float32. A net without a body is not changed."""
    if not hasattr(net, "body"):
        yield
        return
    hooks = _Body(device)
    handles = [
        net.body.register_forward_pre_hook(hooks.enter),
        net.body.register_forward_hook(hooks.leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def bf16_warning(precision: str, device: str) -> str:
    """One sentence if this machine has no bfloat16 units for this device, else ""."""
    if precision != "bf16" or device != "cpu" or not hasattr(torch.cpu, "get_capabilities"):  # torch 2.6 has none
        return ""
    has = torch.cpu.get_capabilities()
    return "" if any(has.get(unit) for unit in ("avx512_bf16", "amx_bf16", "bf16")) else SLOW
