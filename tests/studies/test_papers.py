"""Verdicts on the papers' claims: what counts as reproduced, and where none may be given."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fedskew.core.settings import UsageError
from fedskew.studies.papers import Cell, Claim, cell_of, judge, read_cells, read_claims, write_cell

FLAT = [60.0, 60.2, 59.8, 60.1, 60.0, 59.9, 60.1, 60.0]


def cell(name: str, curve: list[float], *, seed: int = 0, classes: int = 10) -> Cell:
    return Cell(
        name=name, method="fedavg", seed=seed, command="", commit="c0ffee", date="", cpu="", versions={}, digest="d",
        model_digest="m", rounds=len(curve), seconds=1.0, classes=classes, settings={},
        curves={"global": list(enumerate(curve, 1))},
    )  # fmt: skip


def judged(method: list[list[float]], baseline: list[list[float]], **settings: object) -> tuple[str, str]:
    cells = {f"m{i}": cell(f"m{i}", curve) for i, curve in enumerate(method)}
    cells |= {f"b{i}": cell(f"b{i}", curve) for i, curve in enumerate(baseline)}
    claim = Claim(
        where="Table 1",
        claim="is ahead",
        method=[name for name in cells if name[0] == "m"],
        baseline=[name for name in cells if name[0] == "b"],
        **({"paper": (70.0, 60.0)} | settings),  # type: ignore[arg-type]
    )
    found = judge(claim, cells)
    return found.verdict, found.why


def raised(curve: list[float], by: float) -> list[float]:
    return [value + by for value in curve]


@pytest.mark.parametrize(
    ("gain", "verdict"),
    [
        (10.0, "reproduced"),
        (5.1, "reproduced"),
        (4.9, "direction only"),
        (0.1, "not reproduced"),
        (-5, "not reproduced"),
    ],
)
def test_a_gain_is_reproduced_from_half_the_papers_on(gain: float, verdict: str) -> None:
    assert judged([raised(FLAT, gain)], [FLAT], scale="fewer images")[0] == verdict


def test_a_gain_within_the_noise_of_the_seeds_is_not_reproduced() -> None:
    """Gains of 9, 0 and 6 points over three seeds: mean 5, standard error 2.65, 95 % interval 5 ± 11.4."""
    method = [raised(FLAT, gain) for gain in (9.0, 0.0, 6.0)]
    assert judged(method, [FLAT] * 3, scale="fewer images") == ("not reproduced", "no larger than the noise")


def test_no_verdict_rests_on_a_baseline_that_still_rises() -> None:
    rising = [30.0, 35, 40, 45, 50, 55, 60, 65]
    verdict, why = judged([raised(rising, 10)], [rising], scale="fewer rounds")
    assert verdict == "cannot be tested"
    assert "the baseline still rises by 10.0 points" in why


def test_one_seed_s_swing_is_no_trend_but_a_rise_of_the_mean_is() -> None:
    """The last quarters of three seeds are 15 points above, 15 below and level; then one is above."""
    up, down, flat = [60.0] * 6 + [75.0] * 2, [60.0] * 6 + [45.0] * 2, [60.0] * 8
    level = [up, down, flat]
    assert judged([raised(of, 9) for of in level], level, scale="fewer images")[0] == "reproduced"
    rising = [up, flat, flat]
    why = judged([raised(of, 9) for of in rising], rising, scale="fewer images")[1]
    assert "the baseline still rises by 5.0 points" in why


def test_no_verdict_rests_on_a_baseline_near_chance_even_at_the_papers_scale() -> None:
    verdict, why = judged([raised(FLAT, 10)], [[15.0] * 8])
    assert verdict == "cannot be tested"
    assert "near chance" in why


def test_the_length_of_a_published_protocol_is_part_of_the_claim() -> None:
    rising = [30.0, 35, 40, 45, 50, 55, 60, 65]
    assert judged([raised(rising, 30)], [rising])[0] == "reproduced"


def test_a_gain_over_a_baseline_that_is_weaker_than_the_papers_is_not_told_without_it() -> None:
    """FedAvg ends at 60 here and at 71 in the paper: the gain may be larger because the baseline is worse."""
    verdict, why = judged([raised(FLAT, 17.0)], [FLAT], paper=(79.0, 71.0))
    assert verdict == "reproduced"
    assert why.endswith("; our baseline ends 11.0 points below the paper's")
    assert "baseline" not in judged([raised(FLAT, 17.0)], [FLAT], paper=(79.0, 62.0))[1]
    assert "baseline" not in judged([raised(FLAT, 17.0)], [FLAT], paper=(79.0, 71.0), scale="fewer images")[1]


def test_a_tie_in_the_paper_must_be_one_here() -> None:
    tie = {"paper": (60.1, 60.0), "scale": "fewer images"}
    assert judged([raised(FLAT, 0.2)], [FLAT], **tie) == ("reproduced", "a tie in both")
    assert judged([raised(FLAT, 6.0)], [FLAT], **tie)[0] == "not reproduced"


def test_a_method_that_the_paper_has_behind_must_be_behind() -> None:
    behind = {"paper": (50.0, 60.0), "scale": "fewer images"}
    assert judged([raised(FLAT, -9.0)], [FLAT], **behind)[0] == "reproduced"
    assert judged([raised(FLAT, 9.0)], [FLAT], **behind) == ("not reproduced", "the other way round")


def test_a_method_is_faster_if_it_reaches_the_final_level_of_the_baseline_in_fewer_rounds() -> None:
    """The baseline needs its 8 rounds for 60. The method is at 61 from round 3 on; a lucky round does not count."""
    baseline = [30.0, 40, 50, 60, 60, 60, 60, 60]
    fast = [10.0, 30, 61, 61, 61, 61, 61, 61]
    speed = {"rounds": True, "paper": None}
    assert judged([fast], [baseline], **speed)[0] == "reproduced"  # 3 of 8
    assert judged([fast], [baseline], **speed | {"paper": (1.0, 20.0)})[0] == "direction only"  # 5 saved, not 10 of 19
    lucky = [75.0, 30, 40, 50, 55, 59, 59, 59]
    assert judged([lucky], [baseline], **speed) == ("not reproduced", "no larger than the noise")  # never: 9 of 8


def test_a_figure_that_a_run_does_not_have_is_named() -> None:
    for rounds in (False, True):
        with pytest.raises(UsageError, match="b0 has no figure 'personal'; it has global"):
            judged([FLAT], [FLAT], baseline_figure="personal", rounds=rounds)


def test_a_claim_without_its_runs_has_no_verdict() -> None:
    found = judge(Claim(where="Table 1", claim="is ahead", method=["m0"], baseline=["b0"]), {})
    assert (found.verdict, found.why) == ("not run", "waits for m0, b0")
    untested = judge(Claim(where="Table 1", claim="is ahead", untested="no data"), {})
    assert (untested.verdict, untested.why) == ("cannot be tested", "no data")


def test_a_finished_run_is_kept_with_its_curve_and_digest(tmp_path: Path) -> None:
    import fedskew

    run = fedskew.run(
        fedskew.Experiment(rounds=3, evaluation=fedskew.Evaluation(every=2)), out=tmp_path / "run", workers=1
    )
    records = list(run)
    kept = cell_of(tmp_path / "run", name="first", command="fedskew run", commit="c0ffee", cpu="a CPU")
    write_cell(kept, tmp_path / "cells")
    (read,) = read_cells(tmp_path / "cells").values()
    assert read == kept
    assert read.digest == run.result.digest
    last = records[-1].metrics
    assert last is not None
    assert last.global_ is not None
    assert [round for round, _ in read.curves["global"]] == [2, 3]
    assert read.curves["global"][-1][1] == pytest.approx(100 * last.global_.accuracy, abs=1e-3)


def test_a_run_that_is_not_finished_is_refused(tmp_path: Path) -> None:
    import fedskew

    run = fedskew.run(fedskew.Experiment(rounds=3), out=tmp_path / "run", workers=1)
    rounds = iter(run)
    next(rounds)
    rounds.close()  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="is not finished"):
        cell_of(tmp_path / "run", name="first", command="", commit="", cpu="")


def test_a_claims_file_with_an_unknown_word_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "claims.toml"
    path.write_text(
        '[FedX]\ntitle = "X"\nmethod = "fedx"\nsetting = "s"\nclaims = [{where = "T", claim = "c", papr = [1, 2]}]\n'
    )
    with pytest.raises(UsageError, match="papr"):
        read_claims(path)
    assert msgspec.json.decode(msgspec.json.encode(cell("a", FLAT)), type=Cell) == cell("a", FLAT)
