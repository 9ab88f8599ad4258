"""What server and sites say to each other beside tensors, and the check of every word of it."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import msgspec

from fedskew.core.method import Update
from fedskew.deploy.flower.frames import Header
from fedskew.evaluation.scores import ClientScore, Score

Name = str
T = TypeVar("T")


class SiteFacts(msgspec.Struct, forbid_unknown_fields=True):
    """What a site tells of its own data, once: no sample, but its classes and, of images, sums over all pixels."""

    shape: tuple[int, ...]  # of one sample, as it is stored
    kind: str  # uint8 (images) or float32
    labels: tuple[str, ...]
    samples: int
    pixels: int = 0  # per channel
    sums: tuple[int, ...] = ()  # of pixels, per channel
    squares: tuple[int, ...] = ()


class Task(msgspec.Struct, frozen=True):
    """What all sites' own data have in common: what a class is called, how an image is normalised."""

    shape: tuple[int, ...]
    kind: str
    labels: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]


class Ask(msgspec.Struct, frozen=True):
    """The one message of a round to a site. `base` says which of its states counts: the round is committed by it."""

    kind: str  # hello | work | done
    run: str  # hexadecimal
    data: str  # the named set that is dealt, or "sites": each brings its own
    client: int = -1
    sites: int = 0
    round: int = -1
    stage: str = ""
    base: int = -1  # the round whose state of this client counts; -1: it has none
    keep: int = -1  # the server may go back to this round, not further
    train: bool = False
    judge: int = -1  # the round after which the broadcast model is to be judged; -1: not
    settings: dict[str, Any] = {}
    task: Task | None = None
    initial: str = ""  # digest of the model every site starts from


class Answer(msgspec.Struct, forbid_unknown_fields=True):
    """A site's reply; its bytes are the update's payload."""

    lost: str = ""  # why there is no update
    weight: float = 0.0
    metrics: dict[str, float] = {}
    seconds: float = 0.0
    shared: tuple[list[int], list[int], float] | None = None  # correct, total, loss of the server's model
    personal: tuple[list[int], list[int], float] | None = None
    name: Name = ""
    versions: dict[str, str] = {}
    facts: SiteFacts | None = None


def as_header(message: Ask | Answer) -> Header:
    return dict(msgspec.to_builtins(message))


def read(header: Header, kind: type[T]) -> T:
    """The message in a header; ValueError with the reason where it is none."""
    return msgspec.convert(header, kind)


def sane(answer: Answer) -> str:
    """Why an answer's figures cannot be used, or ''."""
    figures = {"weight": answer.weight, "seconds": answer.seconds, **answer.metrics}
    if bad := [name for name, value in figures.items() if not math.isfinite(value)]:
        return f"sent a value that is not finite as {bad[0][:40]}"
    if len(answer.metrics) > 100 or any(len(name) > 100 for name in answer.metrics):
        return "sent more metrics than any method has"
    return ""


def scored(answer: Answer, client: int, classes: int, trained: bool) -> ClientScore | None:
    """The answer's figures of one client's own test part; None where they are missing or make no sense."""
    personal = _score(answer.personal, classes)
    if personal is None or not personal.samples:
        return None
    return ClientScore(client, _score(answer.shared, classes), personal, fallback=not trained)


def _score(given: tuple[list[int], list[int], float] | None, classes: int) -> Score | None:
    if given is None or len(given[0]) != classes or len(given[1]) != classes or not math.isfinite(given[2]):
        return None
    if not all(0 <= correct <= total for correct, total in zip(given[0], given[1], strict=True)):
        return None
    return Score(tuple(given[0]), tuple(given[1]), given[2])


def plain_score(score: Score | None) -> tuple[list[int], list[int], float] | None:
    return None if score is None else (list(score.correct), list(score.total), score.loss)


def update_of(answer: Answer, payload: Any) -> Update:
    return Update(payload, answer.weight, answer.metrics)
