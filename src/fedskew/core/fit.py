"""`fit`: the only training loop. Methods change its loss, which parameters move, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count, islice
from typing import NamedTuple

import torch
from torch import Tensor

from fedskew.core.augment import parse_augment
from fedskew.core.fast.bf16 import bf16_body
from fedskew.core.fast.by_hand import Slope, chain_of, cross_entropy_slope, slope_by_autograd
from fedskew.core.fast.flat import FlatDescent, PlainDescent
from fedskew.core.fast.module_index import module_index, set_mode
from fedskew.core.losses import Corrected, OfLogits, plain
from fedskew.core.net import Net
from fedskew.core.samples import to_device
from fedskew.core.site import Loss, Site
from fedskew.core.training import Training

CHUNK = 1 << 21  # bytes of float input prepared at a time: large enough to spare calls, small enough for the cache


class Fit(NamedTuple):
    """What a training loop did."""

    steps: int
    loss: float  # mean over its steps; 0 without a step


def fit(
    site: Site,
    loss: Loss,
    *,
    train: str | tuple[str, ...] = "",
    epochs: int | None = None,
    steps: int | None = None,
    training: Training | None = None,
    move_statistics: bool = False,
) -> Fit:
    """Minimise `loss` over the site's data, from the model in `site.net`, which then holds the trained one.

    `loss(net, x, y)` returns a scalar. Only parameters whose names start with `train` move ("" is all of them,
    "head." the classifier), and none that were frozen in a user's own net. A part (body, head) in which nothing moves
    runs in evaluation mode, so its batch-norm statistics stay too, unless `move_statistics` is true. `epochs` or
    `steps` (batches) override the length that the settings give; 0 trains nothing. `training` overrides the site's
    settings. Momentum starts at zero.
    """
    net, training = site.net, training or site.training
    index = module_index(net)
    fixed = getattr(net, "fixed", ())
    for name, parameter in index.parameters:
        if parameter.requires_grad != (name.startswith(train) and name not in fixed):
            parameter.requires_grad_(not parameter.requires_grad)
    set_mode(index.layers, True)
    for layers, parameters in index.parts:
        set_mode(layers, move_statistics or any(p.requires_grad for p in parameters))
    if training.batch_norm == "frozen":
        set_mode(index.norms, False)
    if site.fast:
        corrected = loss if isinstance(loss, Corrected) else None
        descent: FlatDescent | PlainDescent = FlatDescent(net, training, corrected)
        loss = corrected.loss if corrected else loss
    else:
        descent = PlainDescent(net, training)
    half = training.precision == "bf16"
    slope = slope_of(loss)
    by_hand = site.fast and type(net) is Net and not (train or fixed) and site.device == "cpu"
    by_hand = by_hand and not half
    chain = chain_of(net, net.body, net.head) if by_hand and slope is not None else None
    done, total, seed = 0, 0.0, int(torch.randint(1 << 62, (), generator=site.rng))
    stream = batches(site, training, epochs=epochs, steps=steps)
    if chain is not None and slope is not None and isinstance(descent, FlatDescent):
        with torch.no_grad():
            for x, y in stream:
                total += chain.gradient(x, y, slope)
                descent.add_terms()
                descent.step()
                done += 1
    else:
        # dropout reads the global generator: seed it from the site's, and restore it afterwards
        with torch.random.fork_rng(devices=[]), bf16_body(net, site.device) if half else nullcontext():
            torch.default_generator.manual_seed(seed)
            for x, y in stream:
                descent.zero_grad()
                value = loss(net, x, y)
                value.backward()  # type: ignore[no-untyped-call]
                total += value.item()
                descent.step()
                done += 1
    return Fit(done, total / max(done, 1))


def slope_of(loss: Loss) -> Slope | None:
    """The part beyond the logits of a loss that looks at the net through them alone; None: of any other loss."""
    if loss is plain:
        return cross_entropy_slope
    return (loss.slope or slope_by_autograd(loss.of)) if isinstance(loss, OfLogits) else None


def batches(
    site: Site, training: Training, *, epochs: int | None = None, steps: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled batches: `steps` of them, or `epochs` passes; with neither, as the settings say.

    Batch norm cannot train on one sample: where a net has it, a last single sample joins the batch before it, and
    a client's only sample is repeated.
    """
    data, size, samples = site.data, training.batch_size, len(site.data)
    if samples == 0:
        return
    if epochs is None and steps is None:
        epochs, steps = training.epochs, training.steps
    augment = parse_augment(training.augment)
    change = None if augment is None else (lambda x: augment(x, site.rng))
    single = samples % size == 1 and bool(module_index(site.net).norms)
    drop = training.drop_last and samples >= size
    used = samples // size * size if drop else samples + (single and samples == 1)
    sizes = [size] * (used // size) + [used % size] * (used % size > 0)
    if single and not drop and len(sizes) > 1:
        sizes[-2:] = [sum(sizes[-2:])]
    per_chunk = max(1, CHUNK // (size * data.x.shape[1:].numel() * 4))
    chunks = [sizes[start : start + per_chunk] for start in range(0, len(sizes), per_chunk)]

    def one_pass() -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(samples, generator=site.rng)
        if used > samples:
            order = order.repeat(2)
        end = 0
        for chunk in chunks:
            start, end = end, end + sum(chunk)
            x, y = data.take(order if end - start == len(order) else order[start:end], change)
            if not site.fast:
                x = x.contiguous()
            x, y = to_device(x, site.device), to_device(y, site.device)
            yield from [(x, y)] if len(chunk) == 1 else zip(torch.split(x, chunk), torch.split(y, chunk), strict=True)

    passes = range(epochs or 0) if steps is None else count()
    yield from islice((batch for _ in passes for batch in one_pass()), steps)
