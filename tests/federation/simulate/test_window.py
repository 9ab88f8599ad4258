"""Which job starts next."""

from __future__ import annotations

from fedskew.federation.simulate.jobs import Job
from fedskew.federation.simulate.window import Window


def jobs(*weights: int) -> list[Job]:
    return [Job("train", 0, "train", client, weight) for client, weight in enumerate(weights)]


def test_the_largest_job_of_the_window_goes_first_and_the_earlier_of_two_alike() -> None:
    """A window of three over weights 1, 5, 5, 9: places 1, 2, 0; then nothing until results are passed on."""
    window = Window(jobs(1, 5, 5, 9), 3)
    assert [window.take() for _ in range(3)] == [1, 2, 0]
    assert not window
    window.advance(1)
    assert window.take() == 3
    assert not window


def test_the_window_moves_with_the_results_and_never_back() -> None:
    window = Window(jobs(*range(10)), 2)
    window.advance(3)  # places 0 to 4 may start
    window.advance(1)
    assert sorted(window.take() for _ in range(5)) == [0, 1, 2, 3, 4]
    assert not window
    window.advance(100)
    assert sorted(window.take() for _ in range(5)) == [5, 6, 7, 8, 9]


def test_a_job_that_is_given_back_is_taken_again() -> None:
    window = Window(jobs(3, 1), 2)
    place = window.take()
    window.give_back(place)
    assert [window.take(), window.take()] == [0, 1]
