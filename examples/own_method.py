"""Your own method: override what differs from FedAvg. `fedskew check own_method.py:Pull` does the same check."""

from dataclasses import dataclass

import fedskew
from fedskew.core.losses import proximal
from fedskew.studies.laws import check


@dataclass(frozen=True)
class Pull(fedskew.Method):
    """FedAvg, and |w - w_t|^2 added to each client's loss."""

    mu: float = 0.1

    def objective(self, site, broadcast, state):
        anchor = site.parameters()
        return lambda net, x, y: site.loss(net, x, y) + self.mu * proximal(net.named_parameters(), anchor)


if __name__ == "__main__":
    *_, last = fedskew.run(fedskew.Experiment(method=Pull(), rounds=3))
    print(f"test accuracy {100 * last.metrics.global_.accuracy:.1f} %")
    method = fedskew.Experiment(method=f"{__file__}:Pull").method
    for outcome in check(method):
        print("broken:" if outcome.problem else "ok:", outcome.law, outcome.problem or "")
