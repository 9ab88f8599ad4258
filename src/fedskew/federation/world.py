"""Everything that is constant in a run: the method, the settings, the data, and which client has which samples.

A worker process is started with a `World`. Everything a client does follows from it and (seed, client, round), so
results are bit-identical in every process and in any order.
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

from fedskew.core.fast.module_index import module_index
from fedskew.core.losses import plain
from fedskew.core.method import MODEL, Method, Update
from fedskew.core.samples import Data
from fedskew.core.seeding import Purpose, seeded
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Payload
from fedskew.core.training import Training
from fedskew.evaluation.scores import ClientScore, Score, Together, score, score_together

CHUNK = 2000  # test samples per job; fixed, so that sums do not depend on the number of workers


class Ragged(NamedTuple):
    """The index arrays of all clients in one tensor; `ragged[client]` is the array of one client."""

    values: Tensor
    offsets: Tensor  # [clients + 1]

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray[Any, np.dtype[np.int64]]]) -> Ragged:
        """Concatenate one array for each client."""
        sizes = np.array([0, *(len(a) for a in arrays)], np.int64)
        values = np.concatenate([np.empty(0, np.int64), *arrays])
        return cls(torch.from_numpy(values), torch.from_numpy(sizes.cumsum()))

    def __getitem__(self, client: int) -> Tensor:  # type: ignore[override]
        return self.values[self.offsets[client] : self.offsets[client + 1]]

    def sizes(self) -> list[int]:
        """The number of samples of each client."""
        return [int(n) for n in self.offsets.diff()]


class ClientRound(NamedTuple):
    """The outcome of one client's round."""

    update: Update
    state: Payload  # the client's new state
    seconds: float


@dataclass(kw_only=True)
class World:
    """The constants of a run, and methods that train or evaluate one client.

    `x` and `y` are the pool of all clients' samples and the public data. `train`, `validation` and `test` are each
    client's indices into the pool, `public` are the server's. `x_test` and `y_test` are the server's test set.
    """

    method: Method
    training: Training
    make_net: Callable[[], Any]  # builds the initial net, the same each time; `Method.prepare` may change it
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
    rounds: int  # of the whole run, including those that the method adds
    mean: tuple[float, ...] = ()  # per channel, to normalise images; (): not normalised
    std: tuple[float, ...] = ()
    noise: tuple[float, ...] | None = None  # each client's feature noise; None: none
    rotation: tuple[float, ...] | None = None  # each client's rotation of images; None: none
    fast: bool = True  # False: torch's own layers and optimisers, the reference
    device: str = "cpu"
    loss: Loss = plain  # the loss of the task
    min_count: int = 1  # a class statistic of fewer samples does not leave a client
    cores: int = 1  # that the server may use while no client trains

    @property
    def population(self) -> int:
        """The number of clients."""
        return len(self.train.offsets) - 1

    @cached_property
    def net(self) -> Any:
        """The only net of this process; one client after another uses it."""
        return self.method.prepare(self.make_net(), seeded(self.seed, Purpose.NET)).to(self.device)

    @cached_property
    def initial(self) -> Payload:
        """The model every site starts from."""
        blank = self._site(-1, self.pool(self.public), Purpose.TRAIN, 0, "init", initial={})
        return blank.model()

    @cached_property
    def spares(self) -> list[Any]:
        """Further nets of this process, which sites reuse as frozen teachers."""
        return []

    def pool(self, index: Tensor, client: int = -1) -> Data:
        """Samples of the pool, with the feature skew of `client` (-1: none)."""
        return Data(self.x, self.y, index, self.mean, self.std, **self._features(client))

    def _features(self, client: int) -> dict[str, Any]:
        if client < 0 or (self.noise is None and self.rotation is None):
            return {}
        seed = int(torch.randint(1 << 40, (), generator=seeded(self.seed, Purpose.NOISE, client)))
        return {
            "noise": self.noise[client] if self.noise else 0.0,
            "rotation": self.rotation[client] if self.rotation else 0.0,
            "seed": seed,
        }

    def site(self, client: int, round: int, stage: str, purpose: Purpose = Purpose.TRAIN) -> Site:
        """The site of a client in one round; client -1 is the server, with its public data."""
        index = self.public if client < 0 else self.train[client]
        return self._site(client, self.pool(index, client), purpose, round, stage, initial=self.initial)

    def _site(self, client: int, data: Data, purpose: Purpose, round: int, stage: str, initial: Payload) -> Site:
        return Site(
            net=self.net,
            data=data,
            training=self.training.at(round, self.rounds),
            classes=self.classes,
            population=self.population,
            initial=initial,
            rng=seeded(self.seed, purpose, client + 1, round),
            client=client,
            round=round,
            rounds=self.rounds,
            stage=stage,
            fast=self.fast,
            device=self.device,
            loss=self.loss,
            min_count=self.min_count,
            spares=self.spares,
        )

    def server_site(self, round: int, stage: str) -> Site:
        """The server's site with its public data; in the stage "evaluate" with its test set."""
        if stage == "evaluate":
            return replace(self.site(-1, round, stage, Purpose.EVALUATE), data=self.test_set(0, len(self.y_test)))
        return replace(self.site(-1, round, stage), cores=self.cores)

    def test_set(self, start: int, end: int) -> Data:
        """Samples `start` to `end` of the server's test set."""
        return Data(self.x_test, self.y_test, torch.arange(start, end), self.mean, self.std)

    def train_client(
        self,
        client: int,
        round: int,
        stage: str,
        broadcast: Payload,
        state: Payload,
        *,
        flip_labels: bool = False,
    ) -> ClientRound:
        """Train one client for one round. `flip_labels`: on the classes in reverse order, as an attacker might."""
        start = time.perf_counter()
        site = self.site(client, round, stage)
        if flip_labels:
            site.data = replace(site.data, y=self.classes - 1 - site.data.y)
        update, new_state = self.method.client(site, broadcast, state)
        return ClientRound(update, new_state, time.perf_counter() - start)

    def evaluate_client(
        self, client: int, round: int, broadcast: Payload, state: Payload, trained: bool, *, validation: bool = False
    ) -> ClientScore:
        """Evaluate the global and the personal model on one client's test samples, or on its validation samples.

        `trained` is whether this client ever trained; one that did not is marked as `fallback`.
        """
        site = self.site(client, round, "evaluate", Purpose.EVALUATE)
        test_part = self.pool((self.validation if validation else self.test)[client], client)
        shared = self._evaluate_shared(site, broadcast, test_part) if self.method.has_global else None
        if shared is not None and self.uses_shared_model(state):
            return ClientScore(client, shared, shared, fallback=not trained)
        site.load(self.method.personalise(site, broadcast, state))
        lacks = self.training.batch_norm == "local" and "buffers" not in state
        personal = score(site.net, test_part, self.classes, device=self.device, batch_statistics=lacks)
        return ClientScore(client, shared, personal, fallback=not trained)

    def evaluate_together(self, clients: Sequence[int], round: int, broadcast: Payload) -> Together:
        """Evaluate the global model on the test samples of several clients; see `can_share_batches`."""
        site = self.site(-1, round, "evaluate", Purpose.EVALUATE)
        site.load(broadcast)
        return score_together(site.net, [self.pool(self.test[c], c) for c in clients], device=self.device)

    @property
    def can_share_batches(self) -> bool:
        """Whether samples of several clients may be evaluated in one batch.

        They may if outputs do not depend on the rest of the batch: batch norm has running statistics and uses them.
        """
        norms = module_index(self.net).norms
        return not norms or (self.training.batch_norm != "local" and all(n.running_mean is not None for n in norms))

    def uses_shared_model(self, state: Payload) -> bool:
        """Whether a client with this state uses the server's model as it is."""
        simple = type(self.method).personalise is Method.personalise
        return self.method.has_global and simple and not state.keys() & set(MODEL)

    def _evaluate_shared(self, site: Site, broadcast: Payload, data: Data) -> Score:
        site.load(broadcast)
        lacks = self.training.batch_norm == "local"
        return score(site.net, data, self.classes, device=self.device, batch_statistics=lacks)

    def chunks(self) -> int:
        """The number of chunks in which the server's test set is evaluated."""
        return -(-len(self.y_test) // CHUNK)

    def evaluate_global(self, chunk: int, round: int, broadcast: Payload) -> Score:
        """Evaluate the global model on one chunk of the server's test set."""
        data = self.test_set(chunk * CHUNK, min((chunk + 1) * CHUNK, len(self.y_test)))
        return self._evaluate_shared(self.site(-1, round, "evaluate", Purpose.EVALUATE), broadcast, data)

    def arrays(self) -> dict[str, Tensor]:
        """The large constant arrays, which worker processes share."""
        ragged = {"train": self.train, "validation": self.validation, "test": self.test}
        flat = {f"{name}.{part}": getattr(r, part) for name, r in ragged.items() for part in Ragged._fields}
        return {"x": self.x, "y": self.y, "x_test": self.x_test, "y_test": self.y_test, "public": self.public, **flat}

    def without_arrays(self) -> World:
        """A copy of this world with empty arrays, to be pickled."""
        return self.with_arrays({name: t[:0].clone() for name, t in self.arrays().items()})

    def with_arrays(self, arrays: dict[str, Tensor]) -> World:
        """A copy of this world with other arrays: the same values in shared memory, say."""
        ragged: dict[str, Any] = {
            name: Ragged(arrays[f"{name}.values"], arrays[f"{name}.offsets"])
            for name in ("train", "validation", "test")
        }
        plain: dict[str, Any] = {name: arrays[name] for name in ("x", "y", "x_test", "y_test", "public")}
        return replace(self, **plain, **ragged)
