"""Ditto: Fair and Robust Federated Learning Through Personalization.

Li, Hu, Beirami, Smith. ICML 2021. arXiv:2012.04221

Algorithm 1, with x the server's model at the start of the round:
    global     y_i <- SGD on f_i from x; the server averages   (FedAvg, bit for bit)
    personal   v_i <- v_i - lr (grad f_i(v_i) + lambda (v_i - x))
v_i starts at the common initial model and is never overwritten by x.
Departure: v_i trains after y_i, on the same batches, instead of alternating with it step by step.
Departure: the server's mean is by number of samples, as FedAvg's (the paper's experiments: uniform).
Departure: a client that has never trained deploys the global model, not the initial v_i.
"""

from dataclasses import dataclass, replace

import torch

from fedskew.core.fit import fit
from fedskew.core.method import Method, Paper, Update
from fedskew.core.settings import setting
from fedskew.core.site import Site
from fedskew.core.tensors import Payload
from fedskew.core.training import NotNegative
from fedskew.methods._shared.control_variates import tethered

OWN = {"personal": "parameters", "personal_buffers": "buffers"}  # where a client's state holds v_i


@dataclass(frozen=True)
class Ditto(Method):
    """FedAvg, and for each client a personal model that is pulled towards the global one."""

    paper = Paper(
        title="Ditto: Fair and Robust Federated Learning Through Personalization",
        authors="Li, Hu, Beirami, Smith",
        venue="ICML 2021",
        link="arXiv:2012.04221",
    )
    formula = (
        r"x &\leftarrow \sum_{i \in S} p_i \, y_i \\ "
        r"v_i &\leftarrow v_i - \eta \, \bigl( \nabla f_i(v_i) + \lambda (v_i - x) \bigr)"
    )
    terms_off = {}  # the global model is FedAvg's with any settings

    lam: NotNegative = setting(
        1.0,
        help="Pull of the personal model towards the global one; 0: it trains alone.",
        source="the authors' default; the paper chooses among 0.1, 1, 2",
        search=(0.01, 2.0),
    )

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        again = torch.Generator()
        again.set_state(site.rng.get_state())
        update, kept = super().client(site, broadcast, state)
        site.load(personal_model(state))
        done = fit(replace(site, rng=again), tethered(site.loss, broadcast["parameters"], self.lam))
        v = site.model()
        update = replace(update, metrics=update.metrics | {"personal_loss": done.loss})
        return update, kept | {place: v[group] for place, group in OWN.items()}

    def personalise(self, site: Site, broadcast: Payload, state: Payload) -> Payload:
        return personal_model(state) or super().personalise(site, broadcast, state)


def personal_model(state: Payload) -> Payload:
    """v_i as a model; empty before the client's first round."""
    return {group: state[place] for place, group in OWN.items() if place in state}
