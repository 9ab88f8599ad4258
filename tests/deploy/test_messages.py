"""What a site reports is checked before it counts."""

from __future__ import annotations

import pytest
import torch

from fedskew.deploy.messages import Answer, as_header, client_score, plain_counts, plain_score, problem_in, read
from fedskew.evaluation.scores import ClientScore, Score, score_of

FINE = ([1, 2], [2, 2], 0.5)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(weight=1.0, metrics={"loss": 0.5}, seconds=2.0), ""),
        (Answer(weight=float("nan")), "not finite as weight"),
        (Answer(seconds=float("inf")), "not finite as seconds"),
        (Answer(metrics={"loss": float("-inf")}), "not finite as loss"),
        (Answer(metrics={"m" * 101: 0.0}), "too many metrics"),
        (Answer(weight=5.0, metrics={"loss": -1e300}), "above 1e+30 as loss"),
        (Answer(seconds=1.7e308), "above 1e+30 as seconds"),
    ],
)
def test_figures_must_be_finite_and_few(answer: Answer, words: str) -> None:
    assert words in problem_in(answer)
    assert bool(problem_in(answer)) == bool(words)


@pytest.mark.parametrize(
    "personal",
    [
        None,
        ([3, 0], [2, 2], 0.5),
        ([-1, 0], [2, 2], 0.5),
        ([1], [2], 0.5),
        (FINE[0], FINE[1], float("nan")),
        (FINE[0], FINE[1], 1e300),
    ],
)
def test_a_score_that_cannot_be_is_left_out(personal: tuple[list[int], list[int], float] | None) -> None:
    assert client_score(Answer(personal=personal), 0, 2, trained=True) is None


def test_a_score_of_no_samples_is_left_out_and_one_of_some_counts() -> None:
    assert client_score(Answer(personal=([0, 0], [0, 0], 0.0)), 0, 2, trained=True) is None
    made = client_score(Answer(personal=FINE, shared=FINE), 3, 2, trained=False)
    assert made is not None
    assert (made.client, made.personal.accuracy, made.shared, made.fallback) == (3, 0.75, made.personal, True)


def a_score(seed: int) -> Score:
    rng = torch.Generator().manual_seed(seed)
    return score_of(torch.randn(20, 2, generator=rng), torch.randint(2, (20,), generator=rng), 2)


def answer_to(score: ClientScore) -> Answer:
    """The answer that a site gives with these scores, as it is read from a message."""
    shared, personal = plain_score(score.shared), plain_score(score.personal)
    return read(as_header(Answer(shared=shared, personal=personal, counts=plain_counts(score))), Answer)


@pytest.mark.parametrize("kind", ["same", "both", "personal"])
def test_counted_predictions_arrive_as_they_were_sent(kind: str) -> None:
    one, other = a_score(0), a_score(1)
    sent = {
        "same": ClientScore(0, one, one, fallback=False),
        "both": ClientScore(0, one, other, fallback=False),
        "personal": ClientScore(0, None, other, fallback=False),
    }[kind]
    found = client_score(answer_to(sent), 0, 2, trained=True)
    assert found is not None
    assert found.personal.counts == sent.personal.counts
    assert (found.shared is found.personal) == (kind == "same")
    assert (found.shared and found.shared.counts) == (sent.shared and sent.shared.counts)


def test_a_score_whose_counts_say_something_else_is_left_out() -> None:
    """Counts of other predictions, and text that is no counts: neither must reach the pooled figures."""
    one = a_score(0)
    answer = answer_to(ClientScore(0, one, one, fallback=False))
    for counts in (plain_counts(ClientScore(0, None, a_score(1), fallback=False)), ["nonsense"]):
        wrong = Answer(shared=answer.shared, personal=answer.personal, counts=counts)
        assert client_score(wrong, 0, 2, trained=True) is None


def test_a_site_of_an_earlier_version_sends_no_counts_and_is_scored_all_the_same() -> None:
    made = client_score(read({"personal": FINE, "shared": FINE}, Answer), 0, 2, trained=True)
    assert made is not None
    assert made.personal.counts is None
    assert made.personal.accuracy == 0.75
