"""FedALA: Adaptive Local Aggregation for Personalized Federated Learning.

Zhang, Hua, Wang, Song, Xue, Ma, Guan. AAAI 2023. arXiv:2212.01197

With x the received model and y_i the client's last trained one, before local training:
    lower layers   those of x
    the last p parameters   y_i + (x - y_i) * W,  0 <= W <= 1, W = 1 at the start
    Eq. 6: W <- clip(W - eta grad * (x - y_i), 0, 1),  grad the loss's gradient at the combined model, per batch of a
           random run of `share` of the samples
The first time W is learned until the loss is steady, afterwards for one pass. In a client's first round the model is x.
The client deploys the combined model; W is learned once more for it and not kept.
Departure: W is learned in evaluation mode, so batch-norm statistics are those of x.
Departure: at most 60 passes the first time (the authors' code has no limit).
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta

from fedskew.core.fit import fit
from fedskew.core.method import Method, Paper, Update
from fedskew.core.samples import pieces
from fedskew.core.settings import setting
from fedskew.core.site import Site
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Count, Positive

OWN, WEIGHTS = "own", "weights"  # groups of a client's state: y_i and W
STEADY, WINDOW, LONGEST = 0.1, 10, 60  # standard deviation of the last losses, how many of them, passes at most


@dataclass(frozen=True)
class FedALA(Method):
    """Each client starts a round from its own mixture of the global model and its last one, learned per entry."""

    paper = Paper(
        title="Adaptive Local Aggregation for Personalized Federated Learning",
        authors="Zhang, Hua, Wang, Song, Xue, Ma, Guan",
        venue="AAAI 2023",
        link="arXiv:2212.01197",
    )
    formula = (
        r"\hat{y}_i &= y_i + (x - y_i) \odot W, \qquad 0 \le W \le 1 \\ "
        r"W &\leftarrow \mathrm{clip}\bigl( W - \eta \, \nabla f_i(\hat{y}_i) \odot (x - y_i), \, 0, \, 1 \bigr)"
    )
    terms_off = None  # clients do not start from the global model
    weak_where = {
        "two": "the global model is a mean of models that started from each client's own head; the personal models are "
        "what it is for (mlp on digits: 98.1 %, FedAvg 84.9; the global model 78.8, FedAvg 85.0)."
    }

    p: Count = setting(
        2,
        help="How many of the last parameters (weights and biases) are mixed; 2: the head.",
        source="the authors' code",
    )
    eta: Positive = setting(1.0, help="Learning rate of W.", source="the paper", search=(0.1, 3.0))
    share: Annotated[float, Meta(gt=0, le=1)] = setting(
        0.8, help="Share of the client's samples that W is learned from.", source="the paper"
    )

    def client(self, site: Site, broadcast: Payload, state: Payload) -> tuple[Update, Payload]:
        weights = self.combine(site, broadcast, state)
        done = fit(site, site.loss)
        kept = {OWN: site.parameters()} | ({WEIGHTS: weights} if weights else {})
        return self.report(site, {"loss": done.loss}), state | site.keeps(self.personal) | kept

    def personalise(self, site: Site, broadcast: Payload, state: Payload) -> Payload:
        self.combine(site, broadcast, state)
        return site.model()

    def combine(self, site: Site, broadcast: Payload, state: Payload) -> Tensors:
        """Load the combined model into the site's net and return W; empty in a client's first round."""
        site.load(broadcast, {group: ts for group, ts in state.items() if group == "buffers"})
        if OWN not in state:
            return Tensors()
        upper = dict(list(site.net.named_parameters())[-self.p :])
        own, gap = ({name: t[name].to(site.device) for name in upper} for t in (state[OWN], broadcast["parameters"]))
        gap = {name: x - own[name] for name, x in gap.items()}
        W = {name: torch.ones_like(g) for name, g in gap.items()}
        W |= {name: w.to(site.device) for name, w in state.get(WEIGHTS, {}).items()}
        for name, parameter in site.net.named_parameters():
            parameter.requires_grad_(name in upper)

        def mix() -> None:
            for name, parameter in upper.items():
                parameter.data.copy_(own[name] + gap[name] * W[name])

        mix()
        site.net.eval()
        losses: list[float] = []
        run = self.random_run(site)
        while not self.finished(losses, first=WEIGHTS not in state):
            for x, y in self.batches(site, run):
                loss = site.loss(site.net, x, y)
                grads = torch.autograd.grad(loss, list(upper.values()))
                W = {
                    name: (w - self.eta * grad * gap[name]).clamp(0, 1)
                    for (name, w), grad in zip(W.items(), grads, strict=True)
                }
                mix()
            losses.append(loss.item())
        return Tensors({name: w.detach().cpu() for name, w in W.items()})

    def random_run(self, site: Site) -> torch.Tensor:
        """Positions of a random run of `share` of the site's samples."""
        n = len(site.data)
        length = max(1, int(self.share * n))
        first = int(torch.randint(n - length + 1, (), generator=site.rng))
        return torch.arange(first, first + length)

    @staticmethod
    def batches(site: Site, run: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The samples of the run in order."""
        for part in pieces(len(run), site.training.batch_size):
            x, y = site.data.take(run[part])
            yield x.to(site.device), y.to(site.device)

    @staticmethod
    def finished(losses: list[float], *, first: bool) -> bool:
        """Whether W has been learned for long enough; `losses` has one entry per pass."""
        if not first:
            return len(losses) >= 1
        steady = len(losses) > WINDOW and statistics.pstdev(losses[-WINDOW:]) < STEADY
        return steady or len(losses) >= LONGEST
