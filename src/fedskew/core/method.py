"""`Method`, the base class of all federated methods, and what its hooks are written with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Generator, Tensor

from fedskew.core.fit import fit
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Mean, Payload, Tensors
from fedskew.core.training import Training

MODEL = ("parameters", "buffers")  # the groups of a payload that make up a model


@dataclass(frozen=True)
class Paper:
    """Where a method was published."""

    title: str
    authors: str  # family names, separated by commas
    venue: str  # with the year where it is known, such as "MLSys 2020"
    link: str = ""  # such as "arXiv:1812.06127"; "" where there is none

    @property
    def reference(self) -> str:
        """Authors, venue and link as one line."""
        return ". ".join(filter(None, (self.authors, self.venue, self.link)))


@dataclass(frozen=True)
class Meant:
    """A condition on runs that a method was made for. It is on the method's page; a run that breaks it is warned."""

    words: str  # the condition, such as "SGD without momentum"
    why: str  # what goes wrong otherwise, or who recommends it; no full stop
    met: Callable[[Training, float], bool]  # of a run's training settings and the share of clients in each round


@dataclass(frozen=True)
class Update:
    """What one client sends to the server after one round."""

    payload: Payload
    weight: float  # in the server's mean; usually the client's number of samples
    metrics: dict[str, float] = field(default_factory=dict)  # named numbers for the round's record

    def plus(self, **groups: Tensors) -> Update:
        """This update with further groups in its payload."""
        return replace(self, payload=self.payload | groups)


def model_of(payload: Payload) -> Payload:
    """The groups of a payload that make up a model: parameters, and buffers where there are any."""
    return {group: payload[group] for group in MODEL if group in payload}


def mean_of(updates: Iterable[Update], *, groups: Sequence[str] = MODEL, uniform: bool = False) -> Payload:
    """Mean of the named groups over a stream of updates, by `Update.weight`; only one update is held at a time.

    `uniform` gives every update the same weight. A group that no update carries is left out: clients with
    `batch_norm = local` send no buffers.
    """
    means: dict[str, Mean] = {}
    for update in updates:
        for group in groups:
            if group in update.payload:
                weight = 1.0 if uniform else update.weight
                means.setdefault(group, Mean()).add(update.payload[group], weight)
    return {group: m.value() for group, m in means.items()}


def overlay(server: Payload, fresh: Payload) -> Payload:
    """The groups of `fresh`; within a group, entries that only the server has are kept."""
    return {group: server[group] | tensors for group, tensors in fresh.items()}


@dataclass(frozen=True)
class Method:
    """Base class of all methods. Implements FedAvg; override what differs.

    A method is a frozen dataclass: its fields are its settings (see `fedskew.core.settings.setting`), its methods are
    the hooks below. A run calls them in this order:

        net = prepare(net, rng)                                          once in every process
        server = init_server(site)                                       once
        for each stage in stages(rounds):
            message = broadcast(server)
            update, state[k] = client(site, message, state[k])           for each client k of the round's cohort
            server = aggregate(site, server, updates)
        model = personalise(site, broadcast(server), state[k])           for each client, when it is evaluated

    Hooks are pure: they change none of their arguments but `site.net` (scratch) and `site.rng`, and they keep nothing
    in the method or in a module. What must survive a round is returned, as the server's payload or as a client's
    state: groups of named tensors, which can be sent and saved. A client's state is empty before its first round.
    Random numbers come from `site.rng` only. That is why runs can be resumed, split over processes and deployed with
    the same results.

    A method whose server moves only part of the way to the clients' mean:

    >>> from dataclasses import dataclass
    >>> import fedskew
    >>> from fedskew.core.settings import setting
    >>> @dataclass(frozen=True)
    ... class PartWay(fedskew.Method):
    ...     step: float = setting(0.5, help="Share of the way; 1 is FedAvg, 0 keeps the initial model.")
    ...     def aggregate(self, site, server, updates):
    ...         averaged = super().aggregate(site, server, updates)
    ...         moved = averaged["parameters"] - server["parameters"]
    ...         return averaged | {"parameters": server["parameters"] + moved * self.step}
    >>> def accuracy(method):
    ...     experiment = fedskew.Experiment(method, split="dirichlet:alpha=0.5,clients=4", model="mlp", rounds=2)
    ...     *_, last = fedskew.run(experiment)
    ...     return last.metrics.global_.accuracy
    >>> accuracy(PartWay(step=0.0)) < accuracy(PartWay(step=0.5)) < accuracy(fedskew.FedAvg())
    True

    The class variables describe the method to the rest of the system. Methods in the registry declare all that apply.
    """

    paper: ClassVar[Paper | None] = None  # where it was published; None: a control
    formula: ClassVar[str] = ""  # its main equations in LaTeX, for its page; lines end with \\ and align at &
    terms_off: ClassVar[dict[str, Any] | None] = None  # settings that make it FedAvg bit for bit; None: none does
    meant: ClassVar[tuple[Meant, ...]] = ()  # what runs it was made for; empty: any
    quick: ClassVar[dict[str, Any]] = {}  # settings that shorten the server's work; payloads keep their shapes
    personal: ClassVar[tuple[str, ...]] = ()  # prefixes of parameter names that a client never sends; ("",): all
    has_global: ClassVar[bool] = True  # whether the server has a model to evaluate and deploy
    # where it is known to end below FedAvg, and why: a net and a split of the soundness battery ("mlp two"), one of
    # the two, or "everywhere"
    weak_where: ClassVar[Mapping[str, str]] = {}
    public: ClassVar[bool] = False  # whether the server needs a public data set
    # whether the server needs only sums over clients (of tensors times weights), never one client's own tensors
    sums_only: ClassVar[bool] = True
    pooled: ClassVar[bool] = False  # whether one client holds the data of all: a control, not federated

    def warning(self, training: Training, share: float) -> str:
        """One sentence that says which conditions in `meant` a run breaks; "" if none.

        `training` are the run's settings, `share` is the share of clients that train in each round.
        """
        broken = [each for each in self.meant if not each.met(training, share)]
        if not broken:
            return ""
        conditions = " and ".join(f"{each.words} ({each.why})" for each in broken)
        return f"{type(self).__name__} is meant for {conditions}; this run's settings differ."

    def stages(self, rounds: int) -> Sequence[str]:
        """The stage of every round to run, given the `rounds` asked for.

        Hooks read the current one from `site.stage`. FedAvg: `rounds` times "train". A method may add rounds of
        another kind, such as CCVR's last one, "calibrate".
        """
        return ["train"] * rounds

    def prepare(self, net: Any, rng: Generator) -> Any:
        """The net to use in place of the initial one, wherever a net is made. FedAvg: `net` itself.

        A method may put another head into `net` here, from features to the same number of logits: training,
        evaluation, saving, personalising and deployment then use it. `rng` depends on the run's seed alone, so all
        sites make the same net. Raise `UsageError` for a net that the method cannot use.
        """
        return net

    @property
    def depends_on_rounds(self) -> bool:
        """Whether what a round computes depends on `site.rounds`; such a run cannot be given more rounds later.

        FedAvg: no. Learning rates are not meant, they are checked by themselves.
        """
        return False

    def init_server(self, site: Site) -> Payload:
        """The server's payload before the first round. FedAvg: the initial model without its personal part.

        `site` is the server's: its data are the public set, empty where there is none.
        """
        site.load()
        return self.report(site, {}).payload

    def broadcast(self, server: Payload) -> Payload:
        """The part of the server's payload that every client of the round receives. FedAvg: the model.

        Has no site: it may only select and combine tensors.
        """
        return model_of(server)

    def objective(self, site: Site, broadcast: Payload, state: Payload) -> Loss:
        """The loss that `client` minimises, a function (net, x, y) -> scalar. FedAvg: `site.loss`, cross entropy.

        Called once a round, before training; `site.frozen(...)` gives nets for teachers and past models.
        """
        return site.loss

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        """One round of one client: train, then return (update for the server, new state of this client).

        `site` holds the client's data, settings and random generator. FedAvg: load the received model, minimise
        `objective`, send what `report` says, keep the personal part of the model. Updates of all clients must have
        the same groups, names and shapes.
        """
        site.load(broadcast, state)
        done = fit(site, self.objective(site, broadcast, state))
        return self.report(site, {"loss": done.loss}), state | site.keeps(self.personal)

    def report(self, site: Site, metrics: dict[str, float]) -> Update:
        """The update made from the model in `site.net`, weighted by the number of samples.

        FedAvg: all parameters but those in `personal`, and the buffers if they are aggregated.
        """
        return Update(site.shares(self.personal), float(len(site.data)), metrics)

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        """The server's next payload. FedAvg: the weighted mean of the updates.

        `updates` is a stream in client order that can be read once; reading it one by one keeps memory small.
        `site` is the server's, as in `init_server`.
        """
        return server | overlay(server, mean_of(updates))

    def personalise(self, site: Site, broadcast: Payload, state: Payload) -> Payload:
        """The model (parameters and buffers) that this client would deploy; it may be trained further first.

        FedAvg: the received model, overlaid by what the client keeps. The client's state does not change.
        """
        site.load(broadcast, state)
        return site.model()

    def layout(self, site: Site, broadcast: Payload) -> Payload | None:
        """A payload with the groups, names, types and shapes of what a client sends in `site.stage`; values are unused.

        Updates that look different are refused. None, the default: the layout is found by running one step of
        `client` on made-up samples, so override this where such a step is expensive or impossible.
        """
        return None

    def ensemble(self, site: Site, server: Payload) -> Tensor | None:
        """Logits [samples, classes] of `site.data` if the server predicts with more than its model, else None.

        FedAvg: None. They are evaluated beside the global model.
        """
        return None
