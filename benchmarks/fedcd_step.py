"""The time of a client's round with FedCD, relative to FedAvg. All prototypes are known.

python benchmarks/fedcd_step.py        goal: at most 1.80
"""

from __future__ import annotations

import time

import torch

from fedskew.core.method import Method
from fedskew.core.samples import Data
from fedskew.core.seeding import one_thread, seeded
from fedskew.core.site import Site
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Training
from fedskew.methods._shared.prototypes import GROUP
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.fedcd import FedCD
from fedskew.models import build

BATCH, STEPS, TURNS, CLASSES, M = 64, 10, 20, 10, 3


def site_of(epochs: int) -> Site:
    """A client in the middle of a run, whose samples are noise of the size of CIFAR images."""
    net, rng = build("simple-cnn", (3, 32, 32), CLASSES, seed=0), seeded(0)
    x = torch.randint(256, (BATCH * STEPS, 32, 32, 3), generator=rng, dtype=torch.uint8)
    data = Data(x, torch.arange(len(x)) % CLASSES, torch.arange(len(x)), (0.5,) * 3, (0.25,) * 3)
    training = Training(lr=0.01, momentum=0.9, weight_decay=1e-5, batch_size=BATCH, epochs=epochs)
    site = Site(net, data, training, CLASSES, 10, {}, rng, client=0, round=50, rounds=100)
    site.initial = site.model()
    return site


def broadcast_of(site: Site, method: Method) -> Payload:
    """The broadcast of a method, with random prototypes if it has any."""
    server = method.init_server(site)
    if GROUP in server:
        j = CLASSES * M
        mean = torch.randn(j, site.net.features, generator=site.rng)
        server[GROUP] = Tensors(mean=mean, count=torch.full((j,), 100.0), known=torch.ones(j, dtype=torch.bool))
    return method.broadcast(server)


def seconds(site: Site, method: Method, broadcast: Payload) -> float:
    """CPU time of one client's round."""
    start = time.process_time()
    method.client(site, broadcast, {})
    return time.process_time() - start


def main() -> None:
    methods = {
        "fedavg": FedAvg(),
        "fedcd": FedCD(M=M),
        "-hpc": FedCD(M=M, hpc=False),
        "-dkd": FedCD(M=M, lam=0),
        "-bpr": FedCD(M=M, gamma=0),
        "rho=0": FedCD(M=M, rho=0),
    }
    for epochs in (1, 10):
        site = site_of(epochs)
        broadcasts = {name: broadcast_of(site, method) for name, method in methods.items()}
        spent: dict[str, list[float]] = {name: [] for name in methods}
        with one_thread():
            for _ in range(max(3, TURNS // epochs)):  # alternating, so that load on the machine affects all methods
                for name, method in methods.items():
                    spent[name].append(seconds(site, method, broadcasts[name]))
        plain = min(spent.pop("fedavg"))
        ratios = "  ".join(f"{name} {min(times) / plain:.2f}" for name, times in spent.items())
        print(f"{epochs:2} epochs  plain step {1e3 * plain / STEPS / epochs:.2f} ms  {ratios}")


if __name__ == "__main__":
    main()
