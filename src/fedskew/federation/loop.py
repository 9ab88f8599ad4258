"""The round loop, the only one there is: it drives any federation, wherever its clients are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fedskew.core.method import Method
from fedskew.core.seeding import one_thread
from fedskew.core.site import Site
from fedskew.core.tensors import Payload
from fedskew.evaluation.scores import by_third, score_of
from fedskew.federation.intake import Intake, expected_layout
from fedskew.federation.protocol import Federation, Record, ServerSite
from fedskew.federation.wire import Entry, size_of


def run(
    method: Method,
    federation: Federation,
    site: ServerSite,
    rounds: int,
    cohort: Callable[[int], list[int]],
    *,
    quorum: int = 1,
    evaluate: Callable[[int], bool] = lambda round: True,
    start: tuple[int, Payload] | None = None,
) -> Iterator[Record]:
    """Yield one record a round. Logging, checkpoints and early stopping belong to the caller.

    `start` is (next round, server state) of a run that is taken up again.
    """
    first, server = start if start is not None else (0, None)
    layouts: dict[str, tuple[Entry, ...]] = {}
    for round, stage in list(enumerate(method.stages(rounds)))[first:]:
        with one_thread():
            began = time.perf_counter()
            if server is None:
                server = method.init_server(site(0, "init"))
            broadcast = method.broadcast(server)
            if stage not in layouts:
                layouts[stage] = expected_layout(method, site(round, stage), broadcast)
            asked = cohort(round)
            intake = Intake(federation.train(round, stage, asked, broadcast), layouts[stage], quorum)
            server = method.aggregate(site(round, stage), server, iter(intake))
            intake.finish()
            federation.commit(round, intake.accepted)
            done = time.perf_counter()
            metrics = None
            if evaluate(round):
                metrics = federation.evaluate(round, method.broadcast(server))
                metrics |= ensemble_figures(method, site(round, "evaluate"), server, metrics.get("groups", {}))
            end = time.perf_counter()
        yield Record(
            round=round,
            stage=stage,
            cohort=asked,
            trained=intake.accepted,
            lost=intake.lost,
            bytes_down={group: size * len(asked) for group, size in size_of(broadcast).items()},
            bytes_up=intake.bytes,
            client_seconds=intake.client_seconds,
            server_seconds=max(0.0, done - began - intake.waited),
            evaluate_seconds=end - done,
            seconds=end - began,
            training=intake.means(),
            metrics=metrics,
            server=server,
        )


def ensemble_figures(
    method: Method, site: Site, server: Payload, groups: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """The figures of what the server could predict with beside its model, if there is such a thing."""
    logits = method.ensemble(site, server) if len(site.data) else None
    if logits is None:
        return {}
    result = score_of(logits, site.data.labels, site.classes)
    return {"ensemble": result.as_dict() | by_third(result, groups)}
