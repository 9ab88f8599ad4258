"""FedPer: Federated Learning with Personalization Layers.

Arivazhagan, Aggarwal, Singh, Choudhary. 2019. arXiv:1912.00818

Algorithm 1, client: body and head together by SGD; the head is the client's own and stays
Algorithm 2, server: W_B = sum_{k in S_t} (n_k / n) W_B,k
Departure: the personal part is the last layer; the original also tries up to four blocks.
Departure: the mean is over a round's cohort; the original's clients all take part.
"""

from dataclasses import dataclass

from fedskew.core.method import Method, Update
from fedskew.core.site import Site


@dataclass(frozen=True)
class FedPer(Method):
    personal = ("head.",)
    has_global = False

    share_head_mean: bool = False  # True: heads are sent, who has none takes the last cohort's mean; FedCRC's Table II

    def report(self, site: Site, metrics: dict[str, float]) -> Update:
        kept_back = () if self.share_head_mean else self.personal
        return Update(site.shares(kept_back), float(len(site.data)), metrics)
