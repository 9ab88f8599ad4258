"""The answer: a lead counts over seeds, one lucky seed does not win, and "use FedAvg" is a possible answer."""

from __future__ import annotations

from fedskew.evaluation.figures import FIGURES
from fedskew.studies.advise.verdict import Values, Verdict, decide, sentence

FIGURE = FIGURES["personal"]


def by_seed(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


BASE = by_seed(0.80, 0.82, 0.78, 0.81, 0.79)


def judged(values: Values) -> Verdict:
    return decide({"fedavg": BASE, **values}, FIGURE, "fedavg")


def said(values: Values, tested: Values | None = None, alone: str | None = "local") -> str:
    known = {"fedavg": BASE, **values}
    verdict = judged(values)
    return sentence(verdict, tested or known, FIGURE, "fedavg", {name: name for name in known}, alone)


def ahead(gap: float, noise: float = 0.001) -> dict[int, float]:
    return {seed: v + gap + noise * (seed % 2) for seed, v in BASE.items()}


def test_one_lucky_seed_does_not_win() -> None:
    lucky = BASE | {3: 0.99}
    found = judged({"fedcrc": lucky})
    assert (found.choice, found.certain) == ("fedavg", False)
    assert found.standings[0].method == "fedcrc"  # its mean is the best
    assert said({"fedcrc": lucky}).startswith(
        "No method is shown to be better than tuned FedAvg on these data: use fedavg"
    )


def test_a_lead_with_every_seed_wins_and_names_its_margin_and_its_ties() -> None:
    values = {"fedcrc": ahead(0.04), "fedrep": ahead(0.039, 0.002), "ditto": ahead(0.01), "local": ahead(0.02)}
    found = judged(values)
    assert (found.choice, found.certain) == ("fedcrc", True)
    assert found.ties == ["fedrep"]
    text = said(values)
    assert text.startswith("Use fedcrc: +4.0 ± 0.07 points over tuned FedAvg (80.00 %); fedrep cannot be told apart")
    assert text.endswith("training alone gives 82.04 %.")


def test_the_best_of_many_needs_more_than_the_best_of_one() -> None:
    """The same lead, 0.02 ± 0.0172, counts alone and not as the best of nine: one of many looks best by chance."""
    lead = {seed: BASE[seed] + d for seed, d in enumerate([0.005, 0.01, 0.02, 0.025, 0.04])}
    assert judged({"fedcrc": lead}).certain
    many = {"fedcrc": lead} | {f"m{i}": dict(BASE) for i in range(8)}
    assert not judged(many).certain
    doubt = "fedcrc has the best mean, 2.0 ± 1.7 points better on validation data, not enough for the best of 9 with 5"
    assert doubt in said(many)


def test_training_alone_may_be_the_answer() -> None:
    """It is not called better than every method if the budget was enough for FedAvg alone."""
    assert said({"local": ahead(0.05)}).startswith(
        "Training alone is better than FedAvg, the only federated method that was compared: +5.0"
    )
    assert said({"local": ahead(0.05), "fedrep": ahead(0.01)}).startswith(
        "Training alone is better than every federated method that was tried: +5.0"
    )


def test_a_winner_that_training_alone_equals_says_so() -> None:
    text = said({"fedrep": ahead(0.04), "local": ahead(0.039, 0.003)})
    assert text.endswith("training alone gives 84.02 %, which cannot be told apart from it.")


def test_test_parts_that_do_not_confirm_the_choice_are_told_and_do_not_change_it() -> None:
    values = {"fedcrc": ahead(0.04)}
    tested = {"fedavg": BASE, "fedcrc": ahead(-0.01)}
    assert judged(values).choice == "fedcrc"
    assert "the test parts do not confirm it: -1.0" in said(values, tested, alone=None)


def test_fewer_than_three_seeds_give_no_answer() -> None:
    two = {"fedavg": by_seed(0.1, 0.1), "fedcrc": by_seed(0.9, 0.9)}
    verdict = decide(two, FIGURE, "fedavg")
    assert (verdict.choice, verdict.certain) == ("fedavg", False)
    text = sentence(verdict, two, FIGURE, "fedavg", {n: n for n in two}, None)
    assert text.startswith("There is no answer: the budget was enough for 2 of the 3 seeds")


def test_fedavg_alone_in_the_final_is_no_answer() -> None:
    assert said({}).startswith("There is no answer: the budget was not enough to compare tuned FedAvg with another")
    assert said({"feddyn": {}}).startswith("There is no answer")


def test_methods_that_are_worse_do_not_hide_that_nothing_is_better() -> None:
    assert said({"feddyn": ahead(-0.2)}, alone=None).startswith("No method is shown to be better")


def test_a_final_run_that_failed_does_not_win_with_the_seeds_that_are_left() -> None:
    assert judged({"feddyn": {0: 0.99, 1: 0.99}}).choice == "fedavg"
    assert judged({"feddyn": {s: v for s, v in ahead(0.1).items() if s != 4}}).choice == "fedavg"
