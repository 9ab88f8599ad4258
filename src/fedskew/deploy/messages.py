"""The messages between server and sites, except their tensors, and the checks of what a site sends."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import msgspec

from fedskew.core.method import Update
from fedskew.core.tensors import Payload
from fedskew.deploy.flower.frames import Header
from fedskew.evaluation.scores import ClientScore, Score
from fedskew.evaluation.sent_counts import from_text, to_text

T = TypeVar("T")
PlainScore = tuple[list[int], list[int], float]  # correct and total by class, loss


class SiteFacts(msgspec.Struct, forbid_unknown_fields=True):
    """What a site reports about its own data, once: no samples; for images, sums over all pixels."""

    shape: tuple[int, ...]  # of one sample, as it is stored
    kind: str  # uint8 (images) or float32
    labels: tuple[str, ...]  # names of its classes
    samples: int  # training samples
    pixels: int = 0  # per channel, over all samples; 0: not images
    sums: tuple[int, ...] = ()  # of the pixels, per channel
    squares: tuple[int, ...] = ()  # of the squared pixels, per channel


class Task(msgspec.Struct, frozen=True):
    """What the data of all sites have in common."""

    shape: tuple[int, ...]  # of one sample
    kind: str  # uint8 or float32
    labels: tuple[str, ...]  # a class's number is its position here
    mean: tuple[float, ...]  # to normalise images, per channel; (): not images
    std: tuple[float, ...]


class Request(msgspec.Struct, frozen=True):
    """A request to a site. A site gets one per round; it evaluates first and then trains.

    A request also commits the round before: `base` says which state of the client counts.
    """

    kind: str  # hello (at the start) | work (a round) | done (the run is over)
    run: str  # identifies the run; hexadecimal
    data: str  # the data set that every site loads and splits, or "sites": each brings its own
    client: int = -1  # the client number of this site
    sites: int = 0  # the number of sites
    round: int = -1
    stage: str = ""
    base: int = -1  # the round whose state of this client counts; -1: it has none
    keep: int = -1  # the earliest round that the server may go back to
    train: bool = False
    counts: bool = False  # whether to send `Answer.counts`: a server of an earlier version would refuse them
    evaluate_round: int = -1  # evaluate the broadcast as the model after this round; -1: do not evaluate
    settings: dict[str, Any] = {}  # the experiment, as in settings.toml
    task: Task | None = None  # with data "sites"
    initial: str = ""  # digest of the initial model


class Answer(msgspec.Struct, forbid_unknown_fields=True):
    """A site's answer to a request. The bytes that come with it are the payload of its update."""

    lost: str = ""  # why there is no update
    weight: float = 0.0
    metrics: dict[str, float] = {}  # of training
    seconds: float = 0.0  # how long it trained
    shared: PlainScore | None = None  # score of the global model on the client's test samples
    personal: PlainScore | None = None  # score of the personal model
    counts: list[str] = []  # predictions behind `shared` and `personal`, counted; one item if these are the same
    name: str = ""  # the name of the site
    versions: dict[str, str] = {}  # of the packages that decide the result, to "hello"
    facts: SiteFacts | None = None  # to "hello" with data "sites"


def as_header(message: Request | Answer) -> Header:
    """The message as plain values, ready for JSON."""
    return dict(msgspec.to_builtins(message))


def read(header: Header, kind: type[T]) -> T:
    """The message of type `kind` in a header; ValueError if it is not one."""
    return msgspec.convert(header, kind)


def problem_in(answer: Answer) -> str:
    """Why the numbers in an answer cannot be used; "" if they can."""
    numbers = {"weight": answer.weight, "seconds": answer.seconds, **answer.metrics}
    if bad := [name for name, value in numbers.items() if not math.isfinite(value)]:
        return f"sent a value that is not finite as {bad[0][:40]}"
    if len(answer.metrics) > 100 or any(len(name) > 100 for name in answer.metrics):
        return "sent too many metrics, or too long names: at most 100 of each are allowed"
    return ""


def client_score(answer: Answer, client: int, classes: int, trained: bool) -> ClientScore | None:
    """The scores in an answer; None if they are missing or invalid. `trained`: whether this client ever trained."""
    texts = [*answer.counts, "", ""]
    personal: Score | None
    shared = _checked_score(answer.shared, classes, texts[0])
    if shared is not None and answer.personal == answer.shared and len(answer.counts) < 2:
        personal = shared
    else:
        personal = _checked_score(answer.personal, classes, texts[0 if answer.shared is None else 1])
    if personal is None or not personal.samples:
        return None
    return ClientScore(client, shared, personal, fallback=not trained)


def plain_counts(score: ClientScore) -> list[str]:
    """The predictions behind a client's scores, as `Answer.counts` has them."""
    scores = [score.personal] if score.shared is score.personal else [score.shared, score.personal]
    return [to_text(counts) for s in scores if s is not None and (counts := s.counts) is not None]


def _checked_score(given: PlainScore | None, classes: int, counts: str = "") -> Score | None:
    """A score that a site sent, with its counts ("": a site of an earlier version); None if anything is impossible."""
    if given is None or len(given[0]) != classes or len(given[1]) != classes or not math.isfinite(given[2]):
        return None
    if not all(0 <= correct <= total for correct, total in zip(given[0], given[1], strict=True)):
        return None
    made = None
    if counts:
        try:
            made = from_text(counts, classes)
        except ValueError:
            return None
        if made.confusion.diagonal().tolist() != given[0] or made.confusion.sum(axis=1).tolist() != given[1]:
            return None
    return Score(tuple(given[0]), tuple(given[1]), given[2], made)


def plain_score(score: Score | None) -> PlainScore | None:
    """A score as it is sent; None stays None."""
    return None if score is None else (list(score.correct), list(score.total), score.loss)


def update_of(answer: Answer, payload: Payload) -> Update:
    """The update in an answer."""
    return Update(payload, answer.weight, answer.metrics)
