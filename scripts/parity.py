"""Compares the same run in one process, and between a server and three sites over TLS: results must be bit-identical.

The losses of evaluations may differ by rounding, since a simulation evaluates clients in common batches. The simulation
gets the `privacy.min_count` that is the default between sites.

python scripts/parity.py                        all five methods
python scripts/parity.py fedavg fedcrc          only these
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from alike import alike
from trial import Trial, end_tidily

from fedskew.deploy.flower_process import FlowerProcess
from fedskew.deploy.server import MIN_COUNT
from fedskew.experiment.config import from_dict
from fedskew.experiment.run import Run
from fedskew.experiment.run_directory import read_run
from fedskew.methods import REGISTRY

METHODS = {  # what each of them tests
    "fedavg": "the model",
    "scaffold": "clients' states",
    "fedcd": "extra tensors",
    "fedcrc": "personal parts",
    "fedddc": "training on the server",
}
COMPARED = ("digest", "model_digest", "metrics", "clients")


def settings(method: str, rounds: int) -> dict[str, Any]:
    """The settings of the run, as in TOML."""
    split = "dirichlet:alpha=0.5,clients=3"
    if REGISTRY[method].public:
        split = f"public:per_class=5+{split}"
    common = {"rounds": rounds, "seed": 7, "training": {"epochs": 1}}
    return {"method": {"name": method}, "split": split, "privacy": {"min_count": MIN_COUNT}} | common


def compare(folder: Path, method: str, rounds: int = 3, stranger: bool = False) -> tuple[list[str], float]:
    """(names of the fields that differ between the two runs, median seconds of a round between sites).

    With `stranger`, a node with an unknown key tries to join meanwhile, and must be refused.
    """
    experiment = from_dict(settings(method, rounds))
    alone = Run(experiment)
    expected = [record.metrics for record in alone]
    config = folder / "experiment.toml"
    folder.mkdir(parents=True)
    config.write_text(experiment.to_toml())
    with Trial(folder) as trial:
        server, port = trial.serve("--config", str(config), "--out", str(folder / "run"))
        sites = [trial.join(site, port, "--data", "digits") for site in trial.sites]
        if stranger:
            check_stranger_is_refused(trial, port)
        if server.end():
            raise RuntimeError(server.output())
        for site in sites:
            site.wait_for("the run is over")
            site.end(60)
        result = trial.result("run")
    assert alone.result is not None
    differ = [field for field in COMPARED if not alike(result[field], alone.result.as_dict()[field])]
    records = read_run(folder / "run").records
    if not alike([record.metrics for record in records], expected):
        differ.append("the records' metrics")
    return differ, statistics.median(record.seconds for record in records)


def check_stranger_is_refused(trial: Trial, port: str) -> None:
    """Try to join with the right authority's certificate and a new key; RuntimeError if the server accepts it."""
    keys = FlowerProcess("keys", {"hosts": [], "sites": ["stranger"]}, None)
    made = keys.receive(60)
    keys.close()
    assert made is not None
    authority = (trial.folder / "certs" / trial.sites[0] / "ca.crt").read_text()
    config = {"server": f"127.0.0.1:{port}", "insecure": False, "ca": authority}
    stranger = FlowerProcess("carrier", config | {"key": made[0]["sites"]["stranger"]["key"]}, None)
    frame = stranger.receive(60)
    stranger.close()
    if frame is None or "does not know this key" not in frame[0].get("text", ""):
        raise RuntimeError(f"a node with an unknown key was not refused: {frame}")


def main() -> None:
    end_tidily()
    failures = 0
    for method in sys.argv[1:] or METHODS:
        if method not in REGISTRY:
            print(f"{method}: unknown method")
            failures += 1
            continue
        with tempfile.TemporaryDirectory() as folder:
            differ, seconds = compare(Path(folder) / method, method)
        outcome = f"DIFFERENT: {', '.join(differ)}" if differ else "bit-identical"
        print(f"{method} ({METHODS.get(method, '')}): {outcome}; {seconds:.1f} s per round", flush=True)
        failures += bool(differ)
    raise SystemExit(failures)


if __name__ == "__main__":
    main()
