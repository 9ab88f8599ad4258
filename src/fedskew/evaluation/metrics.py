"""What one evaluation found, as typed values. Their JSON is what records and results hold.

    global      the server's model on its test set
    clients     a model on each client's own test part, over all clients (or a stated sample of them):
                `global` the server's model, `personal` the one that client would use
    new         the same for clients that never train
    ensemble    what else the server could predict with (Method.ensemble), on its test set

Accuracies are shares from 0 to 1. Nothing here is a maximum over rounds.
"""

from __future__ import annotations

import msgspec

GLOBAL = {"global_": "global"}  # a keyword of Python, but the right word in a file


class ModelMetrics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One model on one set of samples."""

    accuracy: float
    loss: float | None  # mean cross entropy; None in a file: not finite
    per_class: list[float | None]  # accuracy by class; None where there is no sample
    # accuracy over the third of the classes with the most training samples, the rest, and the third with the fewest;
    # only where the largest class has at least twice the samples of the smallest
    head: float | None = None
    middle: float | None = None
    tail: float | None = None


class ClientMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of model over clients that have test samples of their own."""

    mean: float  # of the clients' accuracies, unweighted
    weighted: float  # accuracy over all their samples together
    std: float  # of the clients' accuracies
    worst_decile: float  # mean accuracy of the worst tenth of the clients
    loss: float | None  # over all samples together; None in a file: not finite
    per_class: list[float | None]
    clients: int


class Population(msgspec.Struct, frozen=True, kw_only=True, rename=GLOBAL):
    """The server's model and the clients' own models over one group of clients."""

    global_: ClientMetrics | None  # None: the method has no global model
    personal: ClientMetrics
    never_trained: int  # clients that have not finished a round yet
    sampled: bool  # True: a sample of the clients, not all


class Metrics(msgspec.Struct, frozen=True, kw_only=True, rename=GLOBAL):
    """One evaluation."""

    global_: ModelMetrics | None = None  # None: no global model, or no test set
    clients: Population | None = None
    new: Population | None = None
    ensemble: ModelMetrics | None = None
    groups: dict[str, list[int]] = {}  # which classes head, middle and tail are

    @property
    def classes(self) -> int:
        """How many classes were evaluated; 0 if nothing was."""
        figures = self.global_ or (self.clients and self.clients.personal)
        return len(figures.per_class) if figures else 0

    def with_clients_of(self, other: Metrics) -> Metrics:
        """This evaluation with the client figures of another."""
        return msgspec.structs.replace(self, clients=other.clients, new=other.new)


class ClientRow(msgspec.Struct, frozen=True, kw_only=True, rename=GLOBAL):
    """One client's own figures in the last evaluation."""

    samples: int
    global_: ModelMetrics | None
    personal: ModelMetrics
