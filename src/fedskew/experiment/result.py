"""The closing figures of a run, as a typed value. Its JSON is result.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fedskew.evaluation.figures import headline
from fedskew.evaluation.metrics import ClientRow, Metrics
from fedskew.experiment.config import Experiment
from fedskew.federation.protocol import Record

SCHEMA = 1  # raised when a reader of older files would misread a newer one


class Diagnostics(msgspec.Struct, frozen=True, kw_only=True):
    """What skew did to the model beyond its accuracy; None where it cannot be computed (see diagnostics.py)."""

    eigenvalue_spread: float | None
    head_distance: float | None
    clients: int  # whose heads were compared


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A run in one value: the last evaluation and what all rounds cost."""

    method: str
    seed: int
    rounds: int  # done
    accuracy: float | None  # the run's headline (see evaluation.figures.headline)
    metrics: Metrics | None  # of the last round
    bytes_up: int
    bytes_down: int
    client_seconds: float
    server_seconds: float
    seconds: float
    lost: int  # updates that did not count
    settings: dict[str, Any]  # the experiment, as in settings.toml
    digest: str = ""  # SHA-256 of the server's final state; "": the run did not finish
    model_digest: str = ""  # of the global model alone
    clients: dict[str, ClientRow] = {}  # each client's own figures, by client number
    diagnostics: Diagnostics | None = None
    sites: list[str] = []  # names of the sites in the order of their client numbers, in a deployment
    schema: int = SCHEMA

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as in result.json."""
        return dict(msgspec.to_builtins(self))


def result_of(experiment: Experiment, records: Sequence[Record], **closing: Any) -> Result:
    """The result of a run with these records; `closing` are the fields that only a finished run has."""
    last = records[-1]
    return Result(
        method=experiment.method_name,
        seed=experiment.seed,
        rounds=last.round + 1,
        accuracy=headline(last.metrics),
        metrics=last.metrics,
        bytes_up=sum(sum(r.bytes_up.values()) for r in records),
        bytes_down=sum(sum(r.bytes_down.values()) for r in records),
        client_seconds=sum(r.client_seconds for r in records),
        server_seconds=sum(r.server_seconds for r in records),
        seconds=sum(r.seconds for r in records),
        lost=sum(len(r.lost) for r in records),
        settings=experiment.as_dict(),
        **closing,
    )
