"""The round loop. It is the same for simulated federations and for real sites."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from fedskew.core.method import Method
from fedskew.core.seeding import one_thread
from fedskew.core.site import Site
from fedskew.core.tensors import Payload
from fedskew.evaluation.metrics import Metrics, ModelMetrics
from fedskew.evaluation.scores import score_of
from fedskew.federation.intake import Intake, expected_layout
from fedskew.federation.private import Plan, check_layout, private_updates
from fedskew.federation.protocol import Federation, Record, ServerSite
from fedskew.federation.robust import Robust, robust_updates
from fedskew.federation.wire import Layout, size_of


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
    robust: Robust | None = None,
    private: Plan | None = None,
    validate: Callable[[int, Payload], float | None] | None = None,
    own: Callable[[int, Payload], float | None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Record]:
    """Train round by round and yield a record of each. Checkpoints and logging belong to the caller.

    Args:
        method: the method to run.
        federation: trains and evaluates the clients.
        site: `site(round, stage)` is the server's site.
        rounds: number of training rounds. `method.stages` may add rounds of its own.
        cohort: `cohort(round)` are the clients asked to train in a round.
        quorum: usable updates a round needs; with fewer it raises QuorumLost or Diverged.
        evaluate: `evaluate(round)` is whether to evaluate after a round.
        start: (next round, server state) of a run to resume; None starts with `method.init_server`.
        robust: how updates are aggregated if clients may be hostile; None: as the method does.
        private: differential privacy of clients; None: no noise is added.
        validate: `validate(round, broadcast)` is a figure on validation data, for `Record.validation`, where the round
            is evaluated; None: there is none.
        own: `own(round, broadcast)` is the user's own figure, for `Metrics.own`; None: there is none.
        stop: whether to leave out the remaining rounds of the stage "train". A method's closing stages are carried out.
    """
    first, server = start if start is not None else (0, None)
    layouts: dict[str, Layout] = {}
    for round, stage in list(enumerate(method.stages(rounds)))[first:]:
        if stage == "train" and stop():
            continue
        with one_thread():
            began = time.perf_counter()
            if server is None:
                server = method.init_server(site(0, "init"))
            broadcast = method.broadcast(server)
            if stage not in layouts:
                layouts[stage] = expected_layout(method, site(round, stage), broadcast)
                if private is not None:
                    check_layout(layouts[stage], type(method).__name__)
            asked = cohort(round)
            intake = Intake(federation.train(round, stage, asked, broadcast), layouts[stage], quorum)
            updates, shares = iter(intake), list[float]()
            if robust is not None and robust.on:
                agreed, shares = robust_updates(updates, robust, site(round, stage).rng)
                updates = iter(agreed)
            elif private is not None:
                updates = iter(private_updates(updates, broadcast, private, private.draw(round), round))
            server = method.aggregate(site(round, stage), server, updates)
            intake.finish()
            federation.commit(round, intake.accepted)
            done = time.perf_counter()
            metrics: Metrics | None = None
            validation: float | None = None
            if evaluate(round):
                metrics = federation.evaluate(round, method.broadcast(server))
                validation = validate(round, method.broadcast(server)) if validate is not None else None
                ensemble = ensemble_metrics(method, site(round, "evaluate"), server, metrics.groups)
                mine = own(round, method.broadcast(server)) if own is not None else None
                metrics = msgspec.structs.replace(metrics, ensemble=ensemble, own=mine)
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
            validation=validation,
            before=federation.late_metrics(),
            shares=dict(zip(intake.accepted, shares, strict=False)),
            epsilon=private.epsilon() if private is not None else None,
            server=server,
        )


def ensemble_metrics(
    method: Method, site: Site, server: Payload, groups: Mapping[str, Sequence[int]]
) -> ModelMetrics | None:
    """Metrics of the method's ensemble on the server's test set; None if there is no ensemble or no test set."""
    logits = method.ensemble(site, server) if len(site.data) else None
    return None if logits is None else score_of(logits, site.data.labels, site.classes).metrics(groups)
