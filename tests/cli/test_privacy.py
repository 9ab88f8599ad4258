"""--robust, --epsilon and attacks of --fault on the command line."""

from __future__ import annotations

from typing import Any

import pytest

SMALL = (
    "run",
    "--rounds",
    "1",
    "--split",
    "sample:keep=200+iid:clients=6",
    "--model",
    "mlp:hidden=4",
    "--workers",
    "1",
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--robust", "medain"), "expected one of mean, trimmed, median, geometric, krum"),
        (("--robust", "median+krum"), "expected one rule"),
        (("--robust", "median:attackers=3"), "at most 2 attackers can be withstood"),
        (("--robust", "median", "--method", "fedcd"), "single clients"),
        (("--fault", "wobble:first=2"), "unknown fault 'wobble'"),
        (("--fault", "signflip:first=-1"), "first"),
        (("--epsilon", "many"), "expected a number above 0"),
        (("--epsilon", "8", "--method", "fedcd"), "cannot have differential privacy"),
        (("--epsilon", "8", "--method", "ccvr", "--set", "method.epochs=1"), "cannot have differential privacy"),
    ],
)
def test_mistakes_get_one_sentence(fedskew: Any, options: tuple[str, ...], message: str) -> None:
    done = fedskew(*SMALL, *options)
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err


def test_a_private_run_says_what_it_spent_and_what_that_does_not_cover(
    fedskew: Any, caplog: pytest.LogCaptureFixture
) -> None:
    done = fedskew(*SMALL, "--epsilon", "8")
    assert done.code == 0, done.err
    told = " ".join((done.out + done.err).split())
    assert "epsilon 8 at delta 1e-05, clip 1; it covers the model, not the figures above" in told
    assert "says little here: epsilon is 8 (delta 1e-05) with 6 clients" in caplog.text


def test_a_robust_run_says_how_many_clients_were_left_out(fedskew: Any) -> None:
    done = fedskew(*SMALL, "--fault", "noise:first=1", "--robust", "krum:attackers=1")
    assert done.code == 0, done.err
    assert "left out 16.67 % of clients a round" in " ".join((done.out + done.err).split())
