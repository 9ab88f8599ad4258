"""The soundness battery's verdicts, and its fast part as a law: no method's default collapses on small digits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fedskew.core.method import Method
from fedskew.core.training import Training
from fedskew.experiment.assemble import assemble
from fedskew.experiment.config import Experiment
from fedskew.methods import REGISTRY
from fedskew.methods.fedmr import FedMR
from fedskew.report.soundness import main, markdown, updated, write
from fedskew.studies.execution import execute
from fedskew.studies.soundness import NETS, SPLITS, Job, experiment, rates, run_battery, run_job
from fedskew.studies.soundness_verdict import (
    BESIDE_PUBLIC,
    KINDS,
    REFERENCES,
    Cell,
    Score,
    Scores,
    Verdict,
    judge,
    noise,
    reference_of,
    unsettled,
)
from helpers.methods import each
from helpers.nets import linear_features

CELL = Cell("toy", "mlp", "two")


@dataclass(frozen=True)
class Toy(Method):
    """A method with a documented weakness on one split."""

    weak_where: ClassVar[Mapping[str, str]] = {"two": "heads drift apart."}


def flat(accuracy: float) -> Score:
    """A run that has converged."""
    return Score(accuracy, curve=(accuracy,) * 4)


def scores_of(own: list[float | None], fedavg: tuple[float, ...] = (0.8, 0.82, 0.84), cell: Cell = CELL) -> Scores:
    found: Scores = {(cell, seed): Score(a, "" if a is not None else "the run diverged") for seed, a in enumerate(own)}
    return found | {(Cell("fedavg", cell.net, cell.split), seed): flat(a) for seed, a in enumerate(fedavg)}


def verdict(own: list[float | None], kind: type[Method] = Toy, cell: Cell = CELL) -> tuple[str, str]:
    made = judge(cell, scores_of(own, cell=cell), {"toy": kind})
    return made.kind, made.reason


def test_the_noise_is_two_standard_errors_of_a_difference_of_means() -> None:
    """Seeds 80, 82, 84: deviation 2 points; one seed 2 * 2 * sqrt 2 = 5.66 points, three 2 * 2 * sqrt(2 / 3) = 3.27."""
    scores = scores_of([0.8])
    assert noise(CELL, "fedavg", scores, 1) == pytest.approx(0.0566, abs=1e-4)
    assert noise(CELL, "fedavg", scores, 3) == pytest.approx(0.0327, abs=1e-4)
    assert noise(CELL, "fedavg", scores_of([0.8], (0.8, 0.8, 0.8)), 1) == 0.02  # never less than the test set's


def test_a_cell_is_compared_with_the_same_seeds() -> None:
    """Seed 0: 75 beside 80, within 5.66 points. Three seeds of 75 beside 82: not within 3.27."""
    assert verdict([0.75], Method) == ("ok", "")
    assert verdict([0.75, 0.75, 0.75], Method) == ("below", "")


@pytest.mark.parametrize(("cell", "kind"), [(CELL, "below, documented"), (Cell("toy", "mlp", "iid"), "below")])
def test_a_reason_on_the_method_s_page_holds_where_it_says_only(cell: Cell, kind: str) -> None:
    assert verdict([0.5], cell=cell)[0] == kind


def test_a_reason_may_name_a_net_or_net_and_split_or_everything() -> None:
    for key in ("mlp", "mlp two", "everywhere"):
        kind = type("Other", (Toy,), {"weak_where": {key: "why"}})
        assert verdict([0.5], kind) == ("below, documented", "why")


def test_divergence_and_chance_have_no_excuse() -> None:
    assert verdict([0.1]) == ("at chance", "")
    assert verdict([None]) == ("diverged", "the run diverged")
    assert verdict([0.8, None, 0.8]) == ("diverged", "the run diverged")


@pytest.mark.parametrize(
    ("curve", "reason"),
    [
        ((0.7, 0.72, 0.75, 0.8), "fedavg still rises by 5.0 points over the last quarter of its evaluations"),
        ((0.4, 0.45, 0.45, 0.45), "fedavg ends at 45.0 %, half-trained"),
        ((0.1, 0.1, 0.2, 0.2), "fedavg ends at 20.0 %, near chance (10 %)"),
        ((0.8,), "fedavg has too few evaluations to see whether its curve is flat"),
    ],
)
def test_there_is_no_verdict_beside_a_fedavg_that_has_not_converged(curve: tuple[float, ...], reason: str) -> None:
    """Not below and not documented: the method may only be slower. A collapse is still one."""
    reference = {(Cell("fedavg", "mlp", "two"), 0): Score(0.8, curve=curve)}
    judged = judge(CELL, {(CELL, 0): Score(0.5)} | reference, {"toy": Toy})
    assert (judged.kind, judged.reason) == ("no verdict", reason)
    assert judge(CELL, {(CELL, 0): Score(0.1)} | reference, {"toy": Toy}).kind == "at chance"


def test_a_rise_is_judged_from_the_mean_of_the_seeds() -> None:
    """One seed rises by 3 points in its last quarter, the other falls by 3."""
    reference = Cell("fedavg", "mlp", "two")
    curves = {0: (0.8, 0.8, 0.8, 0.83), 1: (0.8, 0.8, 0.8, 0.77)}
    scores = {(reference, seed): Score(0.8, curve=curve) for seed, curve in curves.items()}
    assert unsettled(reference, scores) == ""
    del scores[reference, 1]
    assert "still rises by 3.0 points" in unsettled(reference, scores)


def test_the_noise_of_a_half_trained_net_does_not_hide_what_is_wrong_on_another() -> None:
    """Seeds 30, 50, 70 on another net that has not converged; on this one they differ by 2 points."""
    other = {(Cell("fedavg", "resnet8", "two"), seed): flat(a) for seed, a in enumerate((0.3, 0.5, 0.7))}
    assert noise(CELL, "fedavg", scores_of([0.8]) | other, 1) == pytest.approx(0.0566, abs=1e-4)


def test_planted_a_battery_of_one_round_gives_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NETS, "mlp", NETS["mlp"]._replace(rounds={"iid": 1}))
    cells = [Cell(name, "mlp", "iid") for name in ("fedavg", "fedncm")]
    scores = {(cell, 0): run_job(Job(cell, 0, 0.1), tmp_path) for cell in cells}
    assert [judge(cell, scores).kind for cell in cells] == ["no verdict", "no verdict"]
    page = markdown({"mlp": 0.1}, [judge(cell, scores) for cell in cells])
    assert "- mlp, iid: fedavg has too few evaluations" in page


def test_a_method_that_breaks_is_a_verdict_and_not_the_end_of_the_battery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Toy):
        def init_server(self, site: Any) -> Any:
            raise KeyError("head.weight")

    monkeypatch.setitem(KINDS, "toy", Broken)
    score = run_job(Job(CELL, 0, 0.1), tmp_path)
    assert score == Score(None, "KeyError: 'head.weight'")
    assert judge(CELL, scores_of([0.5]) | {(CELL, 0): score}, {"toy": Broken}).kind == "failed"


def test_a_method_without_a_global_model_is_compared_with_training_alone() -> None:
    assert reference_of(REGISTRY["fedper"]) == "local"
    assert reference_of(REGISTRY["ditto"]) == "fedavg"
    cell = Cell("fedper", "mlp", "two")
    scores = scores_of([0.9], cell=cell) | {(Cell("local", "mlp", "two"), 0): flat(0.98)}
    assert judge(cell, scores).kind == "below"


def test_seeds_share_the_split() -> None:
    """Else the noise would be that of the splits, which is many times larger than that of training."""
    jobs = [Job(Cell("fedavg", "mlp", "dirichlet"), seed, 0.1) for seed in (0, 1)]
    first, second = (assemble(experiment(job, KINDS["fedavg"])).partition.clients for job in jobs)
    assert [set(samples) for samples in first] == [set(samples) for samples in second]
    y = experiment(jobs[0], KINDS["fedavg"]).data.y_train  # type: ignore[union-attr]
    assert min(len(set(y[samples])) for samples in first) < 10  # the split of the cell, not an IID one


def test_a_method_with_a_public_set_is_compared_with_fedavg_on_the_same_split() -> None:
    """The public set is cut off before the split, so clients hold other samples."""
    assert reference_of(REGISTRY["ratioloss"]) == BESIDE_PUBLIC
    splits = [experiment(Job(Cell(name, "mlp", "two"), 0, 0.1), KINDS[name]).split for name in KINDS]
    by_name = dict(zip(KINDS, splits, strict=True))
    assert by_name["ratioloss"] == by_name[BESIDE_PUBLIC] != by_name["fedavg"]
    cell, beside = Cell("ratioloss", "mlp", "two"), Cell(BESIDE_PUBLIC, "mlp", "two")
    scores = scores_of([0.75], fedavg=(0.9,), cell=cell) | {(beside, 0): flat(0.76)}
    assert judge(cell, scores).kind == "ok"
    assert judge(beside, scores).kind == "reference"


@pytest.mark.parametrize("name", REGISTRY)
def test_weaknesses_are_declared_for_what_the_battery_has(name: str) -> None:
    pairs = {f"{net} {split}" for net in NETS for split in SPLITS}
    assert set(REGISTRY[name].weak_where) <= {*pairs, *NETS, *SPLITS, "everywhere"}
    assert all(why.endswith(".") for why in REGISTRY[name].weak_where.values())


# The law


def last_accuracy(method: Method, seed: int = 0) -> Score:
    """A short run on 600 skewed digits, with features that follow no ReLU."""
    split = "sample:keep=600+dirichlet:alpha=0.5,clients=4,min=10"
    training = Training(lr=0.1, batch_size=16, epochs=2)
    net = linear_features(2, 64)
    public = "public:per_class=5+" if method.public else ""
    outcome = execute(
        Experiment(method, split=public + split, model=net, head="head", rounds=8, seed=seed, training=training), None
    )
    if outcome.failed:
        return Score(None, outcome.failed)
    metrics = [record.metrics for record in outcome.records if record.metrics is not None]
    figures = [m.global_.accuracy if method.has_global and m.global_ else m.clients.personal.mean for m in metrics]  # type: ignore[union-attr]
    return Score(sum(figures[-2:]) / 2, curve=tuple(figures))


@cache
def references() -> Scores:
    """FedAvg and training alone, with three seeds."""
    return {
        (Cell(name, "mlp", "dirichlet"), seed): last_accuracy(KINDS[name](), seed)
        for name in REFERENCES
        for seed in range(3)
    }


def law(name: str, method: Method) -> str:
    """What the battery would say about a method, from one short run."""
    cell = Cell(name, "mlp", "dirichlet")
    return judge(cell, references() | {(cell, 0): last_accuracy(method)}, {name: type(method)}).kind


@pytest.mark.parametrize("name", each(REGISTRY))
def test_no_default_collapses(name: str) -> None:
    """Below FedAvg by the noise may happen in a run this short: `make sound` judges that. Collapse must not.

    CReFF runs with its defaults: the quick settings leave its head untrained.
    """
    kind = REGISTRY[name]
    assert law(name, kind(**({} if name == "creff" else kind.quick))) not in ("diverged", "at chance")


def test_fedavg_learns_in_the_setting_of_the_law() -> None:
    assert all((score.accuracy or 0) > 0.5 for score in references().values())


@dataclass(frozen=True)
class Overpowered(Method):
    """FedAvg with a decorrelation that overpowers the cross entropy, as FedMR's old default on small features."""

    def objective(self, site: Any, broadcast: Any, state: Any) -> Any:
        return FedMR(mu1=30.0, mu2=0.0, limit=0.0).reshaped(site, broadcast)


def test_planted_a_collapse_like_fedmr_s_fails_the_law() -> None:
    assert law("toy", Overpowered()) in ("diverged", "at chance")
    assert law("fedmr", FedMR(mu1=30.0)) in ("ok", "no verdict")  # the same weight, limited


# Running it


def test_a_method_that_changed_runs_again_and_one_that_did_not_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(Cell("fedavg", "mlp", "iid"), 0, 0.1)
    monkeypatch.setitem(SPLITS, "iid", "iid:clients=2")
    first = run_job(job, tmp_path)
    assert run_job(job, tmp_path) == first
    folder = tmp_path / "mlp" / "iid"
    assert len(list(folder.iterdir())) == 1
    monkeypatch.setattr("fedskew.studies.soundness.source", lambda kind: "changed")
    run_job(job, tmp_path)
    assert len(list(folder.iterdir())) == 2


def test_all_methods_have_an_experiment_with_their_defaults() -> None:
    for name, kind in REGISTRY.items():
        made = experiment(Job(Cell(name, "cnn4", "two"), 0, 0.1), kind)
        assert made.method == kind()
        assert made.split.startswith("public:") == kind.public


@pytest.mark.slow
def test_a_part_of_the_battery_runs_resumes_and_makes_a_table(tmp_path: Path, capsys: Any) -> None:
    words = [
        "--methods",
        "fedprox",
        "--nets",
        "mlp",
        "--splits",
        "iid",
        "--workers",
        "1",
        "--out",
        str(tmp_path / "runs"),
    ]
    assert main([*words, "--results", str(tmp_path / "results")]) == 0
    said = capsys.readouterr().out
    assert "|fedprox|" in said.replace(" ", "")
    assert "4 cells, 0 not sound, 0 without a verdict" in said
    assert not (tmp_path / "results").exists()  # a part does not replace the table
    runs = sorted(path.name for path in (tmp_path / "runs" / "mlp" / "iid").iterdir())
    again = run_battery(
        tmp_path / "runs", methods=["fedprox"], nets=["mlp"], splits=["iid"], workers=1, say=lambda text: None
    )
    assert runs == sorted(path.name for path in (tmp_path / "runs" / "mlp" / "iid").iterdir())
    assert markdown(*again) in said


def test_a_part_that_is_written_replaces_its_own_cells_alone(tmp_path: Path) -> None:
    def verdict(method: str, split: str, accuracy: float) -> Verdict:
        return Verdict(Cell(method, "mlp", split), "ok", accuracy, 0.9, 0.02, 1)

    old = [verdict("fedavg", "iid", 0.9), verdict("fedprox", "iid", 0.8), verdict("fedprox", "two", 0.7)]
    write(tmp_path, {"mlp": 0.2}, old)
    part = [verdict("fedavg", "iid", 0.1), verdict("fedprox", "iid", 0.95)]  # a reference comes with every part
    made = updated(tmp_path, ["fedprox"], part)
    assert made.verdicts == [old[0], part[1], old[2]]
    assert made.rates == {"mlp": 0.2}


def test_an_unknown_name_is_one_sentence(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--methods", "fedprxo"])
    assert ended.value.code == 2
    assert "did you mean 'fedprox'?" in capsys.readouterr().err


def test_other_rounds_choose_their_rate_in_another_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder that holds runs with other settings is refused, so the battery could not be resumed."""
    folders: list[Path] = []
    monkeypatch.setattr("fedskew.studies.soundness.choose_rate", lambda *given, **_: folders.append(given[2]) or 0.1)
    rates(["mlp"], tmp_path)
    monkeypatch.setitem(NETS, "mlp", NETS["mlp"]._replace(rounds={"iid": 1, "dirichlet": 1, "two": 1}))
    rates(["mlp"], tmp_path)
    assert len(set(folders)) == 2
