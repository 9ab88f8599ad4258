"""What a federated method is. Everything else in the project runs, measures or reports one.

A method is frozen hyper-parameters plus pure functions: whatever must survive a round is
returned, as the server's state or a client's, in a form that can cross any wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from fedskew.core.fit import fit
from fedskew.core.site import Loss, Site
from fedskew.core.tensors import Mean, Payload, Tensors

MODEL = ("parameters", "buffers")  # the groups of a payload that make up a model


@dataclass(frozen=True)
class Update:
    """What one client tells the server after one round."""

    payload: Payload
    weight: float  # in the server's mean; usually its number of samples
    metrics: dict[str, float] = field(default_factory=dict)  # named scalars for the record

    def plus(self, **groups: Tensors) -> Update:
        return replace(self, payload=self.payload | groups)


def model_of(payload: Payload) -> Payload:
    return {group: payload[group] for group in MODEL if group in payload}


def mean(updates: Iterable[Update], *, groups: Sequence[str] = MODEL, uniform: bool = False) -> Payload:
    """Weighted mean of the named groups over a stream of updates, held one at a time.

    Groups that no update carries are left out: a client with `batch_norm = local` sends no buffers.
    """
    means: dict[str, Mean] = {}
    for update in updates:
        for group in groups:
            if group in update.payload:
                weight = 1.0 if uniform else update.weight
                means.setdefault(group, Mean()).add(update.payload[group], weight)
    return {group: m.value() for group, m in means.items()}


@dataclass(frozen=True)
class Method:
    """Federated averaging, written as the answers another method may give differently."""

    personal: ClassVar[tuple[str, ...]] = ()  # name prefixes of parameters a client never shares
    has_global: ClassVar[bool] = True  # whether the server's model is meant to be used
    public: ClassVar[bool] = False  # whether the server needs a public data set of its own
    pooled: ClassVar[bool] = False  # whether one client holds everybody's data: a control, nothing federated

    def stages(self, rounds: int) -> Sequence[str]:
        """The rounds to run, by name; a method may end with, say, a "calibrate" round."""
        return ["train"] * rounds

    def init_server(self, site: Site) -> Payload:
        site.load()
        return self.report(site, {}).payload

    def broadcast(self, server: Payload) -> Payload:
        return model_of(server)

    def objective(self, site: Site, broadcast: Payload, state: Payload) -> Loss:
        return site.loss

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        """One client's round: (update for the server, state the client keeps)."""
        site.load(broadcast, state)
        done = fit(site, self.objective(site, broadcast, state))
        return self.report(site, {"loss": done.loss}), state | site.keeps(self.personal)

    def report(self, site: Site, metrics: dict[str, float]) -> Update:
        """The update that carries what this site shares of the model in its net."""
        return Update(site.shares(self.personal), float(len(site.data)), metrics)

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        """The server's next state; `updates` come in client order, one at a time."""
        return server | overlay(server, mean(updates))

    def personalise(self, site: Site, broadcast: Payload, state: Payload) -> Payload:
        """The model (parameters and buffers) this client would deploy; may train it further first."""
        site.load(broadcast, state)
        return site.model()

    def layout(self, site: Site, broadcast: Payload) -> Payload | None:
        """A payload with the groups, names, types and shapes of what a client sends in `site.stage`; values are ignored.

        Updates that look different are refused. None, the default: the layout is found by running one step of
        `client` on made-up samples, so override this where such a step is expensive or impossible.
        """
        return None

    def ensemble(self, site: Site, server: Payload) -> Tensor | None:
        """Logits of the site's data from what else the server could predict with; None: it has only its model."""
        return None


def overlay(server: Payload, fresh: Payload) -> Payload:
    """The server's groups with the fresh entries laid over them, name by name."""
    return {group: server[group] | tensors for group, tensors in fresh.items()}
