"""Robust aggregation on an IID and a skewed split: accuracy, worst tenth of clients, honest clients left out.

    python scripts/robust_study.py results/robust/robust.csv        about 10 minutes on one core

FedAvg on digits, 20 clients, all in each round; the server is to withstand 6 attackers, whatever their number. Runs
that the file has already are not repeated.
"""

from __future__ import annotations

import csv
import itertools
import sys
from pathlib import Path
from typing import Any

import fedskew
from fedskew.experiment.config import from_dict
from fedskew.federation.robust import left_out
from fedskew.federation.simulate.faults import attackers

CLIENTS, WITHSTAND, ROUNDS = 20, 6, 15
SPLITS = {"iid": f"iid:clients={CLIENTS}", "dirichlet 0.1": f"dirichlet:alpha=0.1,clients={CLIENTS},min=10"}
ATTACKS = {"signflip": "signflip:strength=3,first={}", "alie": "alie:first={}"}
RULES = ("mean", "trimmed", "median", "geometric", "krum")
MIXINGS = ("none", "nnm")
SEEDS = (0, 1, 2)
COLUMNS = ("split", "attack", "attackers", "rule", "mixing", "seed", "accuracy", "worst_tenth", "honest_left_out")
KEYS = COLUMNS[:6]


def planned() -> list[dict[str, Any]]:
    """All runs; without attackers there is one for each rule and split."""
    found = []
    for seed, split, rule, mixing in itertools.product(SEEDS, SPLITS, RULES, MIXINGS):
        for attack, count in [("none", 0), *itertools.product(ATTACKS, (2, 4, 6))]:
            values = (split, attack, count, rule, mixing, seed)
            found.append(dict(zip(KEYS, values, strict=True)))
    return found


def outcome(one: dict[str, Any]) -> dict[str, Any]:
    """Carry out one run."""
    experiment = from_dict(
        {
            "split": SPLITS[one["split"]],
            "model": "mlp:hidden=32",
            "rounds": ROUNDS,
            "seed": one["seed"],
            "training": {"lr": 0.1, "batch_size": 16, "epochs": 2},
            "evaluation": {"every": ROUNDS},
            "trouble": {"fault": ATTACKS[one["attack"]].format(one["attackers"]) if one["attackers"] else ""},
            "robust": {"rule": one["rule"], "mixing": one["mixing"], "attackers": WITHSTAND},
            "on_divergence": "warn",
        }
    )
    run = fedskew.run(experiment)
    records, faults = list(run), experiment.trouble.faults()
    assert run.result is not None
    excluded = []
    for record in records:
        honest = set(record.trained) - attackers(faults, experiment.seed, record.trained, record.round)
        excluded.append(len(left_out(record.shares) & honest) / len(honest) if record.shares else 0.0)
    metrics = run.result.metrics
    assert metrics is not None
    assert metrics.clients is not None
    worst = metrics.clients.global_.worst_decile if metrics.clients.global_ is not None else None
    return one | {
        "accuracy": round(run.result.accuracy or 0.0, 4),
        "worst_tenth": round(worst or 0.0, 4),
        "honest_left_out": round(sum(excluded) / len(excluded), 4),
    }


def main(path: Path) -> None:
    done = list(csv.DictReader(path.open())) if path.exists() else []
    known = {tuple(str(row[key]) for key in KEYS) for row in done}
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if not done:
            writer.writeheader()
        for one in planned():
            if tuple(str(one[key]) for key in KEYS) not in known:
                writer.writerow(outcome(one))
                file.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
