"""Label counts and differential privacy between processes over TLS: `serve --profile --epsilon`, `join`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from trial import Trial

from fedskew.core.settings import UsageError
from fedskew.deploy.flower_process import interpreter
from fedskew.experiment.run_directory import read_run

pytestmark = pytest.mark.slow
pytest.importorskip("dp_accounting")
try:
    interpreter()
except UsageError as error:
    pytest.skip(str(error), allow_module_level=True)

COUNTS = {"north": (12, 8, 0), "south": (0, 8, 12), "west": (10, 0, 10)}


def test_counts_leave_the_sites_that_allow_it_and_epsilon_is_in_every_record(tmp_path: Path) -> None:
    """west refuses; north also bounds its updates. The run ends with all three sites, noise and figures of skew."""
    rng = np.random.default_rng(0)
    for name, row in COUNTS.items():
        y = np.repeat(["a", "b", "c"], row)
        x = rng.integers(0, 255, (len(y), 4, 4), np.uint8)
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=y, x_test=x[::10], y_test=y[::10])
    policy = tmp_path / "site.toml"
    policy.write_text("profile = true\nclip = 0.01\n")
    more = {"north": ("--policy", str(policy)), "south": ("--allow-profile",), "west": ()}
    with Trial(tmp_path / "trial") as trial:
        out = trial.folder / "run"
        options = ("--data", "sites", "--rounds", "2", "--set", "model=mlp:hidden=4", "--out", str(out))
        server, port = trial.serve(*options, "--profile", "--epsilon", "30")
        for name in trial.sites:
            trial.join(name, port, "--data", str(tmp_path / f"{name}.npz"), *more[name])
        assert server.end(600) == 0, server.output()
        printed = server.output()
    run = read_run(out)
    assert [record.trained for record in run.records] == [[0, 1, 2]] * 2
    assert run.result is not None
    assert run.records[0].epsilon < run.records[1].epsilon == run.result.epsilon <= 30  # type: ignore[operator]
    assert "differential privacy says little here" in printed
    assert "differential privacy of clients: epsilon 30 at delta 1e-05" in printed
    assert "label counts of 2 of 3 sites: total variation 0.30, " in printed  # rows (12, 8, 0) and (0, 8, 12)
    assert "west told none" in printed
    assert "note: site north shortens its updates to a bound of its own" in printed
    assert (run.result.skew["clients"], run.result.skew["sites"]) == (2, 3)
    for name, told in (("north", [12, 8]), ("south", [8, 12]), ("west", None)):
        lines = (trial.folder / "state" / name / "audit.jsonl").read_text().splitlines()
        assert json.loads(lines[0])["told"]["facts"].get("counts") == told
