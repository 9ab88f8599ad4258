"""A place that can train, and `fit`, the only training loop there is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedskew.anatomy import anatomy, set_mode
from fedskew.data.augment import parse_augment
from fedskew.flat import FlatDescent, PlainDescent
from fedskew.tensors import Payload, Tensors
from fedskew.terms import Corrected, plain
from fedskew.training import Training

Loss = Callable[[Any, Tensor, Tensor], Tensor]  # (net, x, y) -> scalar
CHUNK = 1 << 21  # bytes of float input prepared at a time: large enough to spare calls, small enough for the cache


@contextmanager
def one_thread() -> Iterator[None]:
    """A thread more or less changes sums: every site works with one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def seeded(*key: int) -> torch.Generator:
    """A generator that depends on the numbers of its key alone."""
    words = np.random.SeedSequence([k % (1 << 32) for k in key]).generate_state(2, np.uint32)
    return torch.Generator().manual_seed(int(words[0]) << 32 | int(words[1]))


@dataclass(frozen=True)
class Data:
    """Samples of one site: an index into arrays that all sites share, never a copy of them.

    Images are uint8 [n, h, w, c] and become normalised float32 [b, c, h, w] batch by batch, in
    channels-last memory; anything else is float and passes as it is.
    """

    x: Tensor
    y: Tensor  # int64 labels of all of x
    index: Tensor  # int64, this site's samples
    mean: tuple[float, ...] = ()  # per channel, of x / 255
    std: tuple[float, ...] = ()
    noise: float = 0.0  # standard deviation of this client's input noise (feature skew)
    rotation: float = 0.0  # this client's turn in degrees (feature skew)
    seed: int = 0  # of this client's noise

    def __len__(self) -> int:
        return len(self.index)

    @property
    def labels(self) -> Tensor:
        return self.y[self.index]

    def part(self, positions: Tensor) -> Data:
        """The samples at these positions of the index."""
        return replace(self, index=self.index[positions])

    def take(self, positions: Tensor, augment: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Inputs as a net sees them, and labels."""
        chosen = self.index[positions]
        x = self.x.index_select(0, chosen)
        if augment is not None:
            x = augment(x)
        if x.dtype == torch.uint8:
            mean, std = torch.tensor(self.mean), torch.tensor(self.std)
            x = x.float().sub_(mean * 255).div_(std * 255).permute(0, 3, 1, 2)
        if self.rotation or self.noise:
            x = self._skewed(x, chosen)
        return x, self.y.index_select(0, chosen)

    def _skewed(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Feature skew: a pure function of client and sample, so a sample looks the same whenever it is drawn."""
        if self.rotation:
            x = rotated(x, self.rotation)
        if self.noise:
            own = torch.Generator()
            draws = [torch.randn(x.shape[1:], generator=own.manual_seed(self.seed + int(i))) for i in chosen]
            x = x + self.noise * torch.stack(draws)
        return x


def rotated(x: Tensor, degrees: float) -> Tensor:
    """Images [b, c, h, w] turned about their centre; quarter turns are exact."""
    if degrees % 90 == 0:
        return torch.rot90(x, int(degrees // 90) % 4, (2, 3))
    turn = torch.tensor(degrees).deg2rad()
    matrix = torch.stack(
        [torch.stack([turn.cos(), -turn.sin(), turn * 0]), torch.stack([turn.sin(), turn.cos(), turn * 0])]
    )
    grid = nn.functional.affine_grid(matrix.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return nn.functional.grid_sample(x, grid, align_corners=False)


def pieces(n: int, size: int) -> Iterator[Tensor]:
    """The positions 0..n-1, `size` at a time."""
    return (torch.arange(start, min(start + size, n)) for start in range(0, n, size))


@dataclass
class Site:
    """One client's machine, or the server's. Owns no method state."""

    net: Any  # a Net; scratch: overwritten at will, meaningless between calls
    data: Data  # a client's private training data, or the server's public data
    training: Training  # as it is in this round
    classes: int
    population: int  # clients in the federation, not in this round's cohort
    initial: Payload  # the model every site starts from, known to all by its seed
    rng: torch.Generator
    client: int = -1  # -1 is the server
    round: int = 0
    rounds: int = 1
    stage: str = "train"  # see Method.stages
    fast: bool = True  # False: plain layers and torch.optim, the reference
    device: str = "cpu"
    loss: Loss = plain  # the task's own loss, to which methods add their terms
    spares: list[Any] = field(default_factory=list)  # nets that `frozen` may use again
    used: int = 0

    def load(self, *models: Payload) -> None:
        """Fill the net: the initial model, overlaid by each payload's parameters and buffers in turn."""
        fill(self.net, self.initial, *models)

    def parameters(self) -> Tensors:
        """The net's parameters, copied."""
        return self._copies(anatomy(self.net).parameters)

    def buffers(self) -> Tensors:
        """The net's buffers, copied."""
        return self._copies(anatomy(self.net).buffers)

    @staticmethod
    def _copies(entries: Iterable[tuple[str, Tensor]], inside: tuple[str, ...] = (), *, of: bool = False) -> Tensors:
        """Copies of the entries whose names do (`of`), or do not, start with one of the prefixes `inside`."""
        return Tensors({name: copied(t) for name, t in entries if name.startswith(inside) == of})

    def model(self) -> Payload:
        return {"parameters": self.parameters(), "buffers": self.buffers()}

    def shares(self, personal: tuple[str, ...] = ()) -> Payload:
        """What this site sends of the model in its net: all but the personal part and buffers that stay."""
        own = anatomy(self.net)
        shared = {"parameters": self._copies(own.parameters, personal)}
        if self.training.batch_norm == "aggregate":
            shared["buffers"] = self._copies(own.buffers, personal)
        return shared

    def keeps(self, personal: tuple[str, ...] = ()) -> Payload:
        """What this site keeps of the model in its net: the complement of `shares`, empty groups left out."""
        own = anatomy(self.net)
        local = self.training.batch_norm == "local"
        kept = {
            "parameters": self._copies(own.parameters, personal, of=True),
            "buffers": self.buffers() if local else self._copies(own.buffers, personal, of=True),
        }
        return {group: tensors for group, tensors in kept.items() if tensors}

    def frozen(self, *models: Payload) -> Any:
        """A net that holds a model and will not move: a teacher, a past model. Valid while this site lives."""
        if self.used == len(self.spares):
            spare = copy.deepcopy(self.net).requires_grad_(False)
            self.spares.append(spare)
        net = self.spares[self.used]
        self.used += 1
        fill(net.eval(), self.initial, *models)
        return net

    @torch.no_grad()
    def infer(self, function: Callable[[Tensor], Tensor], data: Data | None = None, batch: int = 200) -> Tensor:
        """`function` over all the samples in order, in evaluation mode, without gradient."""
        self.net.eval()
        data = self.data if data is None else data
        return torch.cat([function(data.take(p)[0].to(self.device)).cpu() for p in pieces(len(data), batch)])


def copied(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def fill(net: nn.Module, *models: Payload) -> None:
    own = anatomy(net)
    for group, entries in (("parameters", own.parameters), ("buffers", own.buffers)):
        values = [model[group] for model in reversed(models) if group in model]
        for name, place in entries:
            source = next((v[name] for v in values if name in v), None)
            if source is None:
                raise ValueError(f"no {group} named {name} in the models to load")
            place.detach().copy_(source)


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
    """Minimise `loss` over the site's data.

    Only parameters whose names start with `train` move ("" is all, "head." the classifier). A part
    (body, head) in which nothing moves runs in evaluation mode, so its batch-norm statistics stay
    too, unless `move_statistics` asks for it. `epochs` or `steps` override the settings' length.
    """
    net, training = site.net, training or site.training
    own = anatomy(net)
    for name, parameter in own.parameters:
        parameter.requires_grad_(name.startswith(train))
    set_mode(own.layers, True)
    for layers, parameters in own.parts:
        set_mode(layers, move_statistics or any(p.requires_grad for p in parameters))
    if training.batch_norm == "frozen":
        set_mode(own.norms, False)
    if site.fast:
        corrected = loss if isinstance(loss, Corrected) else None
        descent: FlatDescent | PlainDescent = FlatDescent(net, training, corrected)
        loss = corrected.loss if corrected else loss
    else:
        descent = PlainDescent(net, training)
    done, total = 0, 0.0
    # layers that draw (dropout) read the global generator: give it the site's seed, and give it back
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(torch.randint(1 << 62, (), generator=site.rng)))
        for x, y in batches(site, training, epochs=epochs, steps=steps):
            descent.zero_grad()
            value = loss(net, x, y)
            value.backward()  # type: ignore[no-untyped-call]
            descent.step()
            total += value.item()
            done += 1
    return Fit(done, total / max(done, 1))


def batches(
    site: Site, training: Training, *, epochs: int | None = None, steps: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled batches: `steps` of them, or `epochs` passes, else as the settings say.

    Batch norm cannot train on one sample: where a net has it, a last lone sample joins the batch
    before it, and a client's only sample is taken twice.
    """
    data, size = site.data, training.batch_size
    if len(data) == 0:
        return
    if epochs is None and steps is None:
        epochs, steps = training.epochs, training.steps
    augment = parse_augment(training.augment)
    change = None if augment is None else (lambda x: augment(x, site.rng))
    lonely = len(data) % size == 1 and bool(anatomy(site.net).norms)
    drop = training.drop_last and len(data) >= size

    def pass_over() -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(data), generator=site.rng)
        if drop:
            order = order[: len(order) // size * size]
        elif lonely and len(order) == 1:
            order = order.repeat(2)
        sizes = [size] * (len(order) // size) + [len(order) % size] * (len(order) % size > 0)
        if lonely and not drop and len(sizes) > 1:
            sizes[-2:] = [sum(sizes[-2:])]
        per_chunk = max(1, CHUNK // (size * data.x[0].numel() * 4))
        while sizes:
            now, sizes = sizes[:per_chunk], sizes[per_chunk:]
            x, y = data.take(order[: sum(now)], change)
            order = order[sum(now) :]
            if not site.fast:
                x = x.contiguous()
            yield from zip(torch.split(x.to(site.device), now), torch.split(y.to(site.device), now), strict=True)

    passes = range(epochs or 0) if steps is None else count()
    yield from islice((batch for _ in passes for batch in pass_over()), steps)
