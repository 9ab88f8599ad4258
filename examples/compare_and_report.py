"""Several methods on the same clients with several seeds: one table, and a page to look at."""

import subprocess
import sys

FEDSKEW = [sys.executable, "-m", "fedskew"]
settings = ["--data", "digits", "--split", "dirichlet:alpha=0.1,clients=10", "--rounds", "5"]
subprocess.run(
    [*FEDSKEW, "compare", "fedavg", "fedprox:mu=0.1", "scaffold", "--seeds", "0-1", "--out", "runs/demo", *settings],
    check=True,
)
subprocess.run([*FEDSKEW, "report", "runs/demo", "--out", "report.html"], check=True)
print("open report.html")
