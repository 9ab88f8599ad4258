"""The result of a run. As JSON it is the file result.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fedskew.evaluation.figures import headline, leading_figure
from fedskew.evaluation.metrics import ClientRow, Metrics
from fedskew.experiment.config import Experiment
from fedskew.federation.protocol import Record
from fedskew.federation.robust import mean_left_out

SCHEMA = 1  # version of the format; increased when a reader of older files would misread a newer one


class Diagnostics(msgspec.Struct, frozen=True, kw_only=True):
    """Effects of skewed data on the model besides its accuracy; see `diagnostics.diagnose`."""

    eigenvalue_spread: float | None  # collapse of the global model's features; None: cannot be computed
    head_distance: float | None  # mean distance between clients' heads; None: cannot be computed
    clients: int  # how many clients' heads were compared


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run: its last evaluation, and the costs of all rounds."""

    method: str
    seed: int
    rounds: int  # rounds that were finished
    accuracy: float | None  # of the model that leads (see evaluation.figures.leading_figure); None: not evaluated
    metrics: Metrics | None  # of the last round; None: not evaluated
    bytes_up: int  # clients to server, all rounds
    bytes_down: int  # server to clients
    client_seconds: float  # summed over clients
    server_seconds: float
    seconds: float  # wall-clock time
    lost: int  # updates that were not aggregated
    settings: dict[str, Any]  # the experiment, as in settings.toml
    headline: str = ""  # key of the figure that leads; "": not evaluated, or a file of an earlier version
    digest: str = ""  # SHA-256 of the server's final state; "": the run did not finish
    model_digest: str = ""  # SHA-256 of the global model
    clients: dict[str, ClientRow] = {}  # each client's metrics, by client number
    diverged: str = ""  # why the run counts as diverged; it ended there, unless on_divergence is "warn". "": it did not
    confusion: dict[str, list[list[int]]] = {}  # samples by true and predicted class, see Summary.confusion
    diagnostics: Diagnostics | None = None  # with evaluation.diagnose
    # how skewed the clients are (see skewness.py and data/split/skew.py); empty: not known, as between real sites
    skew: dict[str, float | None] = {}
    epsilon: float | None = None  # privacy spent, at settings' privacy.delta; None: no differential privacy
    # mean share of a round's clients that robust aggregation used by less than half as much as others; None: it is off
    left_out: float | None = None
    stopped: str = ""  # why the run ended before its last round (see `Stop`); "": it did not
    sites: list[str] = []  # names of the clients, in the order of their numbers: sites, or owners of data; []: none
    labels: list[str] = []  # names of the classes, in the order of their numbers; []: an earlier version
    schema: int = SCHEMA

    def as_dict(self) -> dict[str, Any]:
        """The result as plain values, as in result.json."""
        return dict(msgspec.to_builtins(self))


def result_of(experiment: Experiment, records: Sequence[Record], **closing: Any) -> Result:
    """The result of a run with these records (at least one); `closing` are the fields of a finished run."""
    last = records[-1]
    lead = leading_figure(last.metrics)
    return Result(
        method=experiment.method_name,
        seed=experiment.seed,
        rounds=len(records),
        accuracy=headline(last.metrics, "accuracy"),
        headline=lead.key if lead is not None else "",
        metrics=last.metrics,
        bytes_up=sum(sum(r.bytes_up.values()) for r in records),
        bytes_down=sum(sum(r.bytes_down.values()) for r in records),
        client_seconds=sum(r.client_seconds for r in records),
        server_seconds=sum(r.server_seconds for r in records),
        seconds=sum(r.seconds for r in records),
        lost=sum(len(r.lost) for r in records),
        epsilon=last.epsilon,
        left_out=mean_left_out(r.shares for r in records),
        settings=experiment.as_dict(),
        **closing,
    )
