"""Public only: the server trains on its public set alone. The control for methods that use one.

In each round the model is trained on the public set as a client would be on its samples. Clients send their model back
untrained and the server ignores it, so the result is what the public labels are worth without any client.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from fedskew.core.fit import fit
from fedskew.core.method import Method, Update, model_of
from fedskew.core.site import Site
from fedskew.core.tensors import Payload


@dataclass(frozen=True)
class PublicOnly(Method):
    """Control without clients: the server trains on its public set alone."""

    formula = r"x \leftarrow x - \eta \, \nabla f_{D_0}(x)"
    terms_off = None  # clients do not train
    public = True
    weak_where = {"everywhere": "a control: it sees the public samples only."}

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        site.load(broadcast)
        return self.report(site, {}), state

    def aggregate(self, site: Site, server: Payload, updates: Iterable[Update]) -> Payload:
        for _ in updates:  # received and counted, not used
            pass
        site.load(model_of(server))
        fit(site, site.loss)
        return server | site.shares()
