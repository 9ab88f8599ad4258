from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from msgspec import Meta

from fedskew.core.settings import UsageError, build, choose, parse


@dataclass(frozen=True)
class Knobs:
    size: Annotated[int, Meta(ge=1)]
    share: float = 0.5
    kind: Literal["a", "b"] = "a"
    weight: Annotated[float, Meta(ge=0, lt=3)] | Literal["paper"] | None = 1.0
    scale: float | Literal["auto"] = 1.0
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.share == 13:
            raise ValueError("share 13 brings bad luck")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "knobs needs size=..., which was not given."),
        ({"size": 0}, "knobs: size=0 is invalid: expected a whole number of at least 1."),
        ({"size": "many"}, "knobs: size='many' is invalid: expected a whole number of at least 1."),
        ({"size": 1, "kind": "c"}, "knobs: kind='c' is invalid: expected one of a, b."),
        (
            {"size": 1, "weight": 3},
            "knobs: weight=3 is invalid: expected a number of at least 0 and below 3 or one of paper.",
        ),
        ({"size": 1, "scale": "none"}, "knobs: scale='none' is invalid: expected a number or one of auto."),
        ({"size": 1, "shares": 1}, "unknown setting of knobs 'shares'; did you mean 'share'?"),
        ({"size": 1, "share": 13}, "knobs: share 13 brings bad luck"),
    ],
)
def test_what_does_not_fit_is_one_sentence(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        build(Knobs, values, "knobs")
    assert str(caught.value).startswith(sentence)


def test_text_becomes_numbers_where_numbers_are_wanted() -> None:
    made = build(Knobs, {"size": "3", "share": "0.25", "weight": "2", "limit": "7"}, "knobs")
    assert made == Knobs(3, 0.25, weight=2.0, limit=7)
    assert build(Knobs, {"size": 1, "weight": "paper"}, "knobs").weight == "paper"


def test_the_text_form_is_a_chain_of_names_with_options() -> None:
    assert parse("a:x=1, y=2 + b", "thing") == [("a", {"x": "1", "y": "2"}), ("b", {})]


@pytest.mark.parametrize("text", ["", "a:x", "a:=1", "a:x=", "a++b", "a:x=1,x=2"])
def test_a_broken_text_form_is_a_mistake(text: str) -> None:
    with pytest.raises(UsageError):
        parse(text, "thing")


def test_a_name_that_is_nothing_like_any_gets_the_list_alone() -> None:
    with pytest.raises(UsageError, match=r"unknown fruit 'zzz'; Known: apple, pear\."):
        choose("fruit", "zzz", {"pear": 1, "apple": 2})
