"""What one evaluation found, as typed values. Their JSON is what records and results hold.

    global      the server's model on its test set
    clients     a model on each client's own test part, over all clients (or a stated sample of them):
                `global` the server's model, `personal` the one that client would use
    new         the same for clients that never train
    ensemble    what else the server could predict with (Method.ensemble), on its test set

Accuracies and the other figures are shares from 0 to 1. Nothing here is a maximum over rounds.

    accuracy            share of the samples that are predicted right
    recall              of a class: share of its samples that are predicted right (`per_class`)
    precision           of a class: share of the samples predicted as this class that are of it
    balanced_accuracy   mean recall of the classes that have samples
    macro_f1            mean over classes of 2 * precision * recall / (precision + recall), over the classes that occur
                        in the samples or the predictions; `weighted_f1` weights classes by their samples
    auroc, auprc        area under the ROC curve; average precision. With two classes those of class 1 (the second
                        name), else the mean over classes, one class versus the rest; classes without samples are left
                        out. Scores are compared in bins (see evaluation/counts.py)
    ece                 expected calibration error: mean gap between the predicted class's probability and accuracy, in
                        15 bins

Over clients, figures are of the pooled predictions: all samples together, whoever has them. What clients have on
average, how far they differ, and the worst tenth of them is in `ClientMetrics.mean` ... and `ClientMetrics.over`.
"""

from __future__ import annotations

import msgspec

GLOBAL = {"global_": "global"}  # a keyword of Python, but the right word in a file
BALANCED = 1.3  # samples are called balanced if the largest class has at most so many times those of the smallest


class Detail(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a model treats each class. Empty or None in files of earlier versions, and where a figure is undefined."""

    per_class: list[float | None]  # recall: accuracy by class; None where there is no sample
    samples: list[int] = []  # by class
    predicted: list[int] = []  # how many samples were predicted as each class
    balanced_accuracy: float | None = None
    macro_f1: float | None = None
    weighted_f1: float | None = None
    auroc: float | None = None
    auprc: float | None = None
    ece: float | None = None

    @property
    def balanced(self) -> bool | None:
        """Whether every class has about as many samples (see BALANCED); None if that is not known."""
        return max(self.samples) <= BALANCED * min(self.samples) if self.samples else None

    @property
    def precision(self) -> list[float | None]:
        """By class; None where no sample was predicted as it, or in files of earlier versions."""
        rows = zip(self.per_class, self.samples, self.predicted, strict=False)
        found = [round((recall or 0) * n) / said if said else None for recall, n, said in rows]
        return found or [None] * len(self.per_class)

    @property
    def f1(self) -> list[float | None]:
        """By class; None where the class occurs neither in the samples nor in the predictions."""
        rows = zip(self.per_class, self.samples, self.predicted, strict=False)
        found = [2 * round((recall or 0) * n) / (n + said) if n + said else None for recall, n, said in rows]
        return found or [None] * len(self.per_class)


class ModelMetrics(Detail, frozen=True, kw_only=True):
    """One model on one set of samples."""

    accuracy: float
    loss: float | None  # mean cross entropy; None in a file: not finite
    # accuracy over the third of the classes with the most training samples, the rest, and the third with the fewest;
    # only where the largest class has at least twice the samples of the smallest
    head: float | None = None
    middle: float | None = None
    tail: float | None = None


class Over(msgspec.Struct, frozen=True, kw_only=True):
    """One figure over clients: of each client's own predictions, clients weighted equally."""

    mean: float
    std: float
    worst_decile: float  # mean of the worst tenth of the clients
    clients: int  # that have this figure: a client whose samples are all of one class has no auroc


class Spread(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Figures over clients; None where no client has one."""

    balanced_accuracy: Over | None = None
    macro_f1: Over | None = None
    auroc: Over | None = None


class ClientMetrics(Detail, frozen=True, kw_only=True):
    """One kind of model over clients that have test samples of their own. Detail is that of the pooled predictions."""

    mean: float  # of the clients' accuracies, unweighted
    weighted: float  # accuracy over all their samples together
    std: float  # of the clients' accuracies
    worst_decile: float  # mean accuracy of the worst tenth of the clients
    loss: float | None  # over all samples together; None in a file: not finite
    clients: int
    over: Spread = Spread()

    @property
    def accuracy(self) -> float:
        """Accuracy over all samples together; the same as `weighted`."""
        return self.weighted


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
    own: float | None = None  # the user's own figure (evaluation.metric), of the global model on the test set

    @property
    def leading(self) -> ModelMetrics | ClientMetrics | None:
        """The model that stands for a run: the global one on the test set, else on the clients' test parts.

        The personal models if there is no global one; None if nothing was evaluated.
        """
        if self.global_ is not None or self.clients is None:
            return self.global_
        return self.clients.global_ or self.clients.personal

    @property
    def classes(self) -> int:
        """How many classes were evaluated; 0 if nothing was."""
        figures = self.global_ or (self.clients and self.clients.personal)
        return len(figures.per_class) if figures else 0

    def with_clients_of(self, other: Metrics) -> Metrics:
        """This evaluation with the client figures of another."""
        return msgspec.structs.replace(self, clients=other.clients, new=other.new)


class ClientRow(msgspec.Struct, frozen=True, kw_only=True, rename=GLOBAL):
    """One client's own figures in the last evaluation. `samples`, `predicted`, `auprc` and `ece` are left out."""

    samples: int
    global_: ModelMetrics | None
    personal: ModelMetrics
