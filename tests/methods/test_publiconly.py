"""PublicOnly: the public labels alone, whatever the clients have or send."""

from __future__ import annotations

from dataclasses import replace

from fedskew.experiment.config import Experiment
from fedskew.experiment.run import Run
from fedskew.federation.wire import digest
from fedskew.methods.publiconly import PublicOnly
from helpers.public import arrived, server_site

PUBLIC = "public:per_class=20+"


def test_what_clients_send_does_not_count() -> None:
    _, server, sent = arrived()
    method = PublicOnly()
    one = method.aggregate(server_site(), server, iter(sent))
    scaled = [replace(u, payload={g: t * 100.0 for g, t in u.payload.items()}, weight=9.0) for u in sent[:1]]
    assert digest(one) == digest(method.aggregate(server_site(), server, iter(scaled)))
    assert digest(one) != digest(server)


def test_public_labels_alone_are_learnt() -> None:
    run = Run(Experiment(PublicOnly(), split=PUBLIC + "shards:clients=5,per_client=2", rounds=15, model="mlp"))
    last = list(run)[-1]
    assert last.metrics is not None
    assert last.metrics.global_ is not None
    assert last.metrics.global_.accuracy > 0.6
    assert last.training == {}  # clients report no loss: they do not train
