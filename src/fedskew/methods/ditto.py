"""Ditto: Fair and Robust Federated Learning Through Personalization.

Li, Hu, Beirami, Smith. ICML 2021. arXiv:2012.04221

Algorithm 1, with x the server's model at the start of the round:
    global     y_i <- SGD on f_i from x; the server averages   (FedAvg, bit for bit)
    personal   v_i <- v_i - lr (grad f_i(v_i) + lambda (v_i - x))
v_i starts at the common initial model and is never overwritten by x.
Departure: the personal branch follows the global one, on the same batches, instead of alternating with it.
Departure: the server's mean is by number of samples, as FedAvg's (the original's experiments: uniform).
Departure: a client that has never trained deploys the server's model, not v_i = the initial one.
"""

from dataclasses import dataclass, replace

import torch

from fedskew.core.fit import fit
from fedskew.core.method import Method, Update
from fedskew.core.site import Site
from fedskew.core.tensors import Payload
from fedskew.core.training import NotNegative
from fedskew.methods._shared.control_variates import tethered

OWN = {"personal": "parameters", "personal_buffers": "buffers"}  # v_i in a client's state, beside FedAvg's own


@dataclass(frozen=True)
class Ditto(Method):
    lam: NotNegative = 1.0  # the original's default; its choices are 0.1, 1, 2

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        again = torch.Generator()
        again.set_state(site.rng.get_state())
        update, kept = super().client(site, broadcast, state)
        site.load(own(state))
        done = fit(replace(site, rng=again), tethered(site.loss, broadcast["parameters"], self.lam))
        v = site.model()
        update = replace(update, metrics=update.metrics | {"personal_loss": done.loss})
        return update, kept | {place: v[group] for place, group in OWN.items()}

    def personalise(self, site: Site, broadcast: Payload, state: Payload) -> Payload:
        return own(state) or super().personalise(site, broadcast, state)


def own(state: Payload) -> Payload:
    """v_i as a model; empty before the client's first round."""
    return {group: state[place] for place, group in OWN.items() if place in state}
