"""The same run twice: in one process, and between a server and three sites over TLS with keys. Are the bits the same?

python scripts/parity.py                        all five methods
python scripts/parity.py fedavg fedcrc          these
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from trial import Trial, end_tidily

from fedskew.deploy.child import Child
from fedskew.experiment.config import from_dict
from fedskew.experiment.run import Run
from fedskew.experiment.run_directory import read_run
from fedskew.methods import REGISTRY

METHODS = {  # what each must carry beyond FedAvg
    "fedavg": "the model",
    "scaffold": "clients' states",
    "fedcd": "extra tensors",
    "fedcrc": "personal parts",
    "fedddc": "training on the server",
}
SAME = ("digest", "model_digest", "metrics", "clients")


def settings(method: str, rounds: int) -> dict[str, Any]:
    split = "dirichlet:alpha=0.5,clients=3"
    if REGISTRY[method].public:
        split = f"public:per_class=5+{split}"
    return {"method": {"name": method}, "split": split, "rounds": rounds, "seed": 7, "training": {"epochs": 1}}


def compare(folder: Path, method: str, rounds: int = 3, stranger: bool = False) -> tuple[list[str], float]:
    """What differs between the two runs, and the seconds a round took over the network.

    `stranger`: a node whose key the server does not know must be turned away meanwhile.
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
            knock(trial, port)
        if server.end():
            raise RuntimeError(server.output())
        for site in sites:
            site.wait_for("the run is over")
            site.end(15)
        result = trial.result("run")
    assert alone.result is not None
    differ = [word for word in SAME if result[word] != alone.result.as_dict()[word]]
    records = read_run(folder / "run").records
    if [record.metrics for record in records] != expected:
        differ.append("the records' metrics")
    return differ, statistics.median(record.seconds for record in records)


def knock(trial: Trial, port: str) -> None:
    """A node with the right authority and a key of its own making."""
    keys = Child("keys", {"hosts": [], "sites": ["stranger"]}, None)
    made = keys.hear(60)
    keys.close()
    assert made is not None
    authority = (trial.folder / "certs" / trial.sites[0] / "ca.crt").read_text()
    door = {"server": f"127.0.0.1:{port}", "insecure": False, "ca": authority}
    stranger = Child("carrier", door | {"key": made[0]["sites"]["stranger"]["key"]}, None)
    told = stranger.hear(60)
    stranger.close()
    if told is None or "does not know this key" not in told[0].get("text", ""):
        raise RuntimeError(f"a stranger was not turned away: {told}")


def main() -> None:
    end_tidily()
    asked = sys.argv[1:] or list(METHODS)
    wrong = 0
    for method in asked:
        if method not in REGISTRY:
            print(f"{method}: is not there")
            wrong += 1
            continue
        with tempfile.TemporaryDirectory() as folder:
            differ, seconds = compare(Path(folder) / method, method)
        verdict = f"DIFFERENT: {', '.join(differ)}" if differ else "the same bits"
        print(f"{method} ({METHODS.get(method, '')}): {verdict}; {seconds:.1f} s a round", flush=True)
        wrong += bool(differ)
    raise SystemExit(wrong)


if __name__ == "__main__":
    main()
