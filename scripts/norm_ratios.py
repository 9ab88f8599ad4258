"""How far apart the norms of honest updates are: each method on a skewed split, the largest ratio to the usual norm.

python scripts/norm_ratios.py > results/norm-bound/ratios.json
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from fedskew.experiment.assemble import assemble
from fedskew.experiment.config import from_dict
from fedskew.federation.loop import run
from fedskew.federation.norms import norms_of
from fedskew.federation.protocol import Reply
from fedskew.federation.simulate.simulation import Simulation
from fedskew.methods import REGISTRY

SPLIT = "dirichlet:alpha=0.1,clients=10"  # clients of very different sizes, most classes missing
ROUNDS, SEEDS = 3, (0, 1)


class Watched(Simulation):
    """A simulation that notes the largest ratio of an update's norm to the usual one, by group."""

    ratios: dict[str, float]

    def train(self, round: int, stage: str, cohort: Sequence[int], broadcast: Any) -> Iterator[Reply]:
        replies = list(super().train(round, stage, cohort, broadcast))
        norms = [norms_of(reply.update.payload) for reply in replies if reply.update is not None]
        base = norms_of(broadcast)
        for group in {group for own in norms for group in own}:
            values = sorted(own[group] for own in norms if own.get(group, 0.0) > 0)
            usual = max(values[(len(values) - 1) // 2] if len(values) > 1 else 0.0, base.get(group, 0.0))
            if usual:
                self.ratios[group] = max(self.ratios.get(group, 0.0), values[-1] / usual)
        yield from replies


def ratios(method: str, seed: int) -> dict[str, float]:
    """The largest ratio in any round, by group of the update."""
    split = f"public:per_class=5+{SPLIT}" if REGISTRY[method].public else SPLIT
    experiment = from_dict({"method": {"name": method}, "split": split, "rounds": ROUNDS, "seed": seed})
    assembled = assemble(experiment)
    with Watched(assembled.world) as simulation:
        simulation.ratios = {}
        for _ in run(experiment.method, simulation, assembled.world.server_site, ROUNDS, assembled.cohort):
            pass
        return simulation.ratios


def main() -> None:
    found: dict[str, Any] = {"split": SPLIT, "rounds": ROUNDS, "seeds": SEEDS, "data": "digits", "methods": {}}
    for method, kind in REGISTRY.items():
        if kind.pooled:
            continue
        largest: dict[str, float] = {}
        for seed in SEEDS:
            for group, ratio in ratios(method, seed).items():
                largest[group] = round(max(largest.get(group, 0.0), ratio), 3)
        found["methods"][method] = dict(sorted(largest.items()))
    found["largest"] = max(ratio for groups in found["methods"].values() for ratio in groups.values())
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
