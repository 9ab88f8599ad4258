"""Your own samples: arrays in memory, and a CSV whose rows belong to hospitals."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

import fedskew

# 1. Arrays or any torch data set: fedskew splits them among clients.
rng = np.random.default_rng(0)
y = rng.integers(3, size=600)
x = rng.normal(size=(600, 8)).astype(np.float32) + y[:, None]
data = fedskew.from_dataset(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), name="blobs")
*_, last = fedskew.run(fedskew.Experiment(data=data, split="dirichlet:alpha=0.5,clients=5", rounds=5))
print(f"arrays: test accuracy {100 * last.metrics.global_.accuracy:.1f} %")

# 2. A CSV with a label column and an owner column: each hospital is a client. Missing values are filled.
rows = ["age,pressure,hospital,diagnosis"]
for i in range(300):
    sick = i % 3 == 0
    pressure = "" if i % 10 == 0 else f"{rng.normal(150 if sick else 120, 15):.0f}"
    rows.append(f"{rng.integers(30, 80)},{pressure},{'ABC'[i % 7 % 3]},{'sick' if sick else 'healthy'}")
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "patients.csv"
    path.write_text("\n".join(rows))
    experiment = fedskew.Experiment(data=f"{path}?label=diagnosis&owner=hospital", split="natural", rounds=10)
    *_, last = fedskew.run(experiment)
print(f"patients: balanced accuracy {100 * last.metrics.global_.balanced_accuracy:.1f} %")
