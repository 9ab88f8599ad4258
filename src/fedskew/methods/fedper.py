"""FedPer: Federated Learning with Personalization Layers.

Arivazhagan, Aggarwal, Singh, Choudhary. Preprint, 2019. arXiv:1912.00818

Algorithm 1, client: SGD on body and head together; the head stays with the client
Algorithm 2, server: W_B = sum_{k in S_t} (n_k / n) W_B,k
Departure: the personal part is the head (the paper also tries up to four blocks).
Departure: the mean is over a round's cohort (in the paper all clients take part).
"""

from dataclasses import dataclass

from fedskew.core.method import Meant, Method, Paper, Update
from fedskew.core.settings import setting
from fedskew.core.site import Site


@dataclass(frozen=True)
class FedPer(Method):
    """FedAvg on the body; every client keeps a head of its own."""

    paper = Paper(
        title="Federated Learning with Personalization Layers",
        authors="Arivazhagan, Aggarwal, Singh, Choudhary",
        venue="Preprint, 2019",
        link="arXiv:1912.00818",
    )
    formula = (
        r"W_B \leftarrow \sum_{k \in S} \frac{n_k}{n} \, W_{B,k}, \qquad \text{client } k \text{ predicts with } "
        r"(W_B, W_{P,k})"
    )
    terms_off = None  # heads are never averaged into a global model
    meant = (
        Meant(
            "all clients in every round",
            "as its authors train: the head of an absent client falls behind the body",
            lambda training, share: share == 1,
        ),
    )
    personal = ("head.",)
    has_global = False
    weak_where = {
        "resnet8": "the body is shared, as in FedAvg, which is at 66.6 % (dirichlet) and 47.1 % (two) after 8 rounds, "
        "and a client with few classes does best alone: 88.0 % and 94.3 %, training alone 94.5 % and 98.2 %."
    }

    share_head_mean: bool = setting(
        False,
        help="True: heads are sent too, and a client without a head takes the mean of the last cohort's.",
        source="the paper; True is FedCRC's Table II",
    )

    def report(self, site: Site, metrics: dict[str, float]) -> Update:
        kept_back = () if self.share_head_mean else self.personal
        return Update(site.shares(kept_back), float(len(site.data)), metrics)
