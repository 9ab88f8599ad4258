import math

import pytest

from fedskew.core.settings import UsageError, build
from fedskew.core.training import Training


def test_steps_begin_at_their_round() -> None:
    """FedCRC's schedule: rounds 0-49 at .05, 50-74 at .01, 75-99 at .001."""
    t = Training(lr=0.05, schedule="steps:50=0.01,75=0.001")
    assert [t.rate(r, 100) for r in (0, 49, 50, 74, 75, 99)] == [0.05, 0.05, 0.01, 0.01, 0.001, 0.001]


def test_steps_below_one_are_fractions_of_the_run() -> None:
    t = Training(lr=0.05, schedule="steps:0.5=0.01,0.75=0.001")
    assert [t.rate(r, 20) for r in (9, 10, 14, 15)] == [0.05, 0.01, 0.01, 0.001]


def test_cosine_falls_to_zero_and_exponential_by_its_rate() -> None:
    cosine = Training(lr=0.2, schedule="cosine")
    assert cosine.rate(0, 10) == 0.2
    assert math.isclose(cosine.rate(5, 10), 0.1)
    assert math.isclose(Training(lr=1.0, schedule="exponential:rate=0.9").rate(2, 10), 0.81)


def test_the_settings_of_a_round_have_its_learning_rate() -> None:
    at = Training(lr=1.0, schedule="exponential:rate=0.5").at(3, 10)
    assert (at.lr, at.schedule, at.rate(7, 10)) == (0.125, "constant", 0.125)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"lr": -1}, "lr=-1"),
        ({"lr": "fast"}, "expected a number"),
        ({"momentum": 1.0}, "momentum"),
        ({"optimiser": "sdg"}, "expected one of sgd, adam"),
        ({"batch_norm": "keep"}, "aggregate, local, frozen"),
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"schedule": "steps"}, "is invalid: expected something like steps:50"),
        ({"schedule": "steps:a=0.1"}, "is invalid: expected something like steps:50"),
        ({"schedule": "exponential:rate=x"}, "is invalid: expected numbers"),
        ({"schedule": "exponential:rate=-1"}, "expected finite numbers of at least 0"),
        ({"schedule": "exponential:rate=nan"}, "expected finite numbers of at least 0"),
        ({"schedule": "steps:50=-0.1"}, "expected finite numbers of at least 0"),
        ({"schedule": "steps:50=inf"}, "expected finite numbers of at least 0"),
        ({"lr": float("inf")}, "lr=inf is invalid: expected a finite number"),
        ({"schedule": "cosine+constant"}, "more than one part"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"learning_rate": 0.1}, "unknown setting of training 'learning_rate'"),
    ],
)
def test_an_invalid_setting_is_one_sentence(values: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        build(Training, values, "training")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
