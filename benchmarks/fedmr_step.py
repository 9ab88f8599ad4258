"""The time of a training step with FedMR's two losses, relative to a step without them.

python benchmarks/fedmr_step.py        goal: at most 1.30 for each
"""

from __future__ import annotations

import time

import torch

from fedskew.core.fit import fit
from fedskew.core.samples import Data
from fedskew.core.seeding import one_thread, seeded
from fedskew.core.site import Site
from fedskew.core.tensors import Payload
from fedskew.core.training import Training
from fedskew.methods._shared.prototypes import GROUP, prototypes_of
from fedskew.methods.fedmr import FedMR
from fedskew.models import build

BATCH, STEPS, TURNS, CLASSES = 128, 5, 20, 10


def site_with(projection: bool, held: int) -> Site:
    """A client with `held` of the classes, whose samples are noise of the size of CIFAR images."""
    net = build("simple-cnn", (3, 32, 32), CLASSES, seed=0, projection=projection)
    rng = seeded(0)
    x = torch.randint(256, (BATCH * STEPS, 32, 32, 3), generator=rng, dtype=torch.uint8)
    data = Data(x, torch.arange(len(x)) % held, torch.arange(len(x)), (0.5,) * 3, (0.25,) * 3)
    site = Site(net, data, Training(lr=0.01, batch_size=BATCH), CLASSES, 10, {}, rng)
    site.initial = site.model()
    return site


def seconds(site: Site, method: FedMR, broadcast: Payload) -> float:
    """CPU time of one step, without the computation of prototypes."""
    site.load(broadcast)
    loss = method.reshaped(site, broadcast)
    start = time.process_time()
    steps = fit(site, loss, steps=STEPS).steps
    return (time.process_time() - start) / steps


def main() -> None:
    methods = {
        "fedavg": FedMR(mu1=0, mu2=0),
        "both": FedMR(),
        "intra": FedMR(mu2=0),
        "inter": FedMR(mu1=0),
        "lite 10": FedMR(lite=10),
    }
    for projection, held in ((False, 2), (False, 10), (True, 2), (True, 10)):
        site = site_with(projection, held)
        site.load()
        everything = torch.ones(CLASSES)  # as if every class were known
        broadcast = site.model() | {GROUP: prototypes_of(site) | {"count": everything}}
        spent: dict[str, list[float]] = {name: [] for name in methods}
        with one_thread():
            for _ in range(TURNS):  # alternating, so that load on the machine affects all methods
                for name, method in methods.items():
                    spent[name].append(seconds(site, method, broadcast))
        plain = min(spent.pop("fedavg"))
        ratios = "  ".join(f"{name} {min(times) / plain:.3f}" for name, times in spent.items())
        print(f"d {site.net.features:3}  {held:2} classes  plain step {1e3 * plain:.2f} ms  {ratios}")


if __name__ == "__main__":
    main()
