"""All that is fixed for a run: who holds which samples, and how a site is made. And the work done at one.

A world is what a worker process is given; it makes every site from (seed, client, round) alone, so
the same work has the same bits wherever and whenever it is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedskew.core.losses import plain
from fedskew.core.method import Method, Update
from fedskew.core.samples import Data
from fedskew.core.seeding import seeded
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Payload
from fedskew.core.training import Training
from fedskew.data.dataset import DataSet
from fedskew.data.split.partition import Partition, Parts
from fedskew.evaluation.scores import ClientScore, Score, score

TRAIN, EVALUATE, NOISE = 1, 2, 3  # what a generator is for: part of its seed
CHUNK = 2000  # test samples per job; fixed, so that sums do not depend on the number of workers


class Ragged(NamedTuple):
    """Index arrays of all clients, end to end."""

    values: Tensor
    offsets: Tensor  # [clients + 1]

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray[Any, np.dtype[np.int64]]]) -> Ragged:
        sizes = np.array([0, *(len(a) for a in arrays)], np.int64)
        values = np.concatenate([np.empty(0, np.int64), *arrays])
        return cls(torch.from_numpy(values), torch.from_numpy(sizes.cumsum()))

    def __getitem__(self, client: int) -> Tensor:  # type: ignore[override]
        return self.values[self.offsets[client] : self.offsets[client + 1]]

    def sizes(self) -> list[int]:
        return [int(n) for n in self.offsets.diff()]


class Trained(NamedTuple):
    update: Update
    state: Payload
    seconds: float


@dataclass
class World:
    method: Method
    training: Training
    make_net: Callable[[], Any]  # the common initial net; seeded
    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    train: Ragged
    validation: Ragged
    test: Ragged
    public: Tensor
    classes: int
    seed: int
    rounds: int  # of the whole run, the method's own stages included
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    noise: tuple[float, ...] | None = None
    rotation: tuple[float, ...] | None = None
    fast: bool = True
    device: str = "cpu"
    loss: Loss = plain

    @property
    def population(self) -> int:
        return len(self.train.offsets) - 1

    @cached_property
    def net(self) -> Any:
        """The one net of this process, used for every client in turn."""
        return self.make_net().to(self.device)

    @cached_property
    def initial(self) -> Payload:
        blank = self._site(-1, self.pool(self.public), TRAIN, 0, "init", initial={})
        return blank.model()

    @cached_property
    def spares(self) -> list[Any]:
        return []

    def pool(self, index: Tensor, client: int = -1) -> Data:
        """Samples of the training pool, seen as this client sees them."""
        return Data(self.x, self.y, index, self.mean, self.std, **self._features(client))

    def _features(self, client: int) -> dict[str, Any]:
        if client < 0 or (self.noise is None and self.rotation is None):
            return {}
        seed = int(torch.randint(1 << 40, (), generator=seeded(self.seed, NOISE, client)))
        return {
            "noise": self.noise[client] if self.noise else 0.0,
            "rotation": self.rotation[client] if self.rotation else 0.0,
            "seed": seed,
        }

    def site(self, client: int, round: int, stage: str, purpose: int = TRAIN) -> Site:
        """Client's site, or the server's (-1), in one round."""
        index = self.public if client < 0 else self.train[client]
        return self._site(client, self.pool(index, client), purpose, round, stage, initial=self.initial)

    def _site(self, client: int, data: Data, purpose: int, round: int, stage: str, initial: Payload) -> Site:
        return Site(
            self.net,
            data,
            self.training.at(round, self.rounds),
            self.classes,
            self.population,
            initial,
            seeded(self.seed, purpose, client + 1, round),
            client,
            round,
            self.rounds,
            stage,
            self.fast,
            self.device,
            self.loss,
            self.spares,
        )

    def server_site(self, round: int, stage: str) -> Site:
        """The server's site: on its public data, or to evaluate on the balanced test set."""
        if stage == "evaluate":
            return replace(self.site(-1, round, stage, EVALUATE), data=self.balanced(0, len(self.y_test)))
        return self.site(-1, round, stage)

    def balanced(self, start: int, end: int) -> Data:
        """A piece of the balanced test set."""
        return Data(self.x_test, self.y_test, torch.arange(start, end), self.mean, self.std)

    def work(self, client: int, round: int, stage: str, broadcast: Payload, state: Payload) -> Trained:
        """One client's round."""
        start = time.perf_counter()
        update, kept = self.method.client(self.site(client, round, stage), broadcast, state)
        return Trained(update, kept, time.perf_counter() - start)

    def judge(self, client: int, round: int, broadcast: Payload, state: Payload, trained: bool) -> ClientScore:
        """The server's model and the client's own on one client's test part."""
        site = self.site(client, round, "evaluate", EVALUATE)
        own = self.pool(self.test[client], client)
        shared = self._shared(site, broadcast, own) if self.method.has_global else None
        simple = type(self.method).personalise is Method.personalise and not state.keys() & {"parameters", "buffers"}
        if shared is not None and simple:
            return ClientScore(client, shared, shared, fallback=not trained)
        site.load(self.method.personalise(site, broadcast, state))
        lacks = self.training.batch_norm == "local" and "buffers" not in state
        personal = score(site.net, own, self.classes, device=self.device, batch_statistics=lacks)
        return ClientScore(client, shared, personal, fallback=not trained)

    def _shared(self, site: Site, broadcast: Payload, data: Data) -> Score:
        site.load(broadcast)
        lacks = self.training.batch_norm == "local"
        return score(site.net, data, self.classes, device=self.device, batch_statistics=lacks)

    def chunks(self) -> int:
        return -(-len(self.y_test) // CHUNK)

    def examine(self, chunk: int, round: int, broadcast: Payload) -> Score:
        """The server's model on one piece of the balanced test set."""
        data = self.balanced(chunk * CHUNK, min((chunk + 1) * CHUNK, len(self.y_test)))
        return self._shared(self.site(-1, round, "evaluate", EVALUATE), broadcast, data)

    def arrays(self) -> dict[str, Tensor]:
        """The large, constant parts: what worker processes share."""
        ragged = {"train": self.train, "validation": self.validation, "test": self.test}
        flat = {f"{name}.{part}": getattr(r, part) for name, r in ragged.items() for part in Ragged._fields}
        return {"x": self.x, "y": self.y, "x_test": self.x_test, "y_test": self.y_test, "public": self.public, **flat}

    def with_arrays(self, arrays: dict[str, Tensor]) -> World:
        """This world over other memory that holds the same arrays."""
        ragged: dict[str, Any] = {
            name: Ragged(arrays[f"{name}.values"], arrays[f"{name}.offsets"])
            for name in ("train", "validation", "test")
        }
        plain: dict[str, Any] = {name: arrays[name] for name in ("x", "y", "x_test", "y_test", "public")}
        return replace(self, **plain, **ragged)


def make_world(
    data: DataSet,
    partition: Partition,
    parts: Sequence[Parts],
    *,
    method: Method,
    training: Training,
    make_net: Callable[[], Any],
    seed: int,
    rounds: int,
    fast: bool = True,
    device: str = "cpu",
) -> World:
    return World(
        method,
        training,
        make_net,
        torch.from_numpy(data.x_train),
        torch.from_numpy(data.y_train),
        torch.from_numpy(data.x_test),
        torch.from_numpy(data.y_test),
        Ragged.of([p.train for p in parts]),
        Ragged.of([p.validation for p in parts]),
        Ragged.of([p.test for p in parts]),
        torch.from_numpy(partition.public),
        data.classes,
        seed,
        rounds,
        data.mean,
        data.std,
        partition.noise,
        partition.rotation,
        fast,
        device,
    )
