"""What a site reports is checked before it counts."""

from __future__ import annotations

import pytest

from fedskew.deploy.messages import Answer, client_score, problem_in

FINE = ([1, 2], [2, 2], 0.5)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(weight=1.0, metrics={"loss": 0.5}, seconds=2.0), ""),
        (Answer(weight=float("nan")), "not finite as weight"),
        (Answer(seconds=float("inf")), "not finite as seconds"),
        (Answer(metrics={"loss": float("-inf")}), "not finite as loss"),
        (Answer(metrics={"m" * 101: 0.0}), "too many metrics"),
    ],
)
def test_figures_must_be_finite_and_few(answer: Answer, words: str) -> None:
    assert words in problem_in(answer)
    assert bool(problem_in(answer)) == bool(words)


@pytest.mark.parametrize(
    "personal",
    [None, ([3, 0], [2, 2], 0.5), ([-1, 0], [2, 2], 0.5), ([1], [2], 0.5), (FINE[0], FINE[1], float("nan"))],
)
def test_a_score_that_cannot_be_is_left_out(personal: tuple[list[int], list[int], float] | None) -> None:
    assert client_score(Answer(personal=personal), 0, 2, trained=True) is None


def test_a_score_of_no_samples_is_left_out_and_one_of_some_counts() -> None:
    assert client_score(Answer(personal=([0, 0], [0, 0], 0.0)), 0, 2, trained=True) is None
    made = client_score(Answer(personal=FINE, shared=FINE), 3, 2, trained=False)
    assert made is not None
    assert (made.client, made.personal.accuracy, made.shared, made.fallback) == (3, 0.75, made.personal, True)
