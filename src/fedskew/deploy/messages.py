"""The messages between server and sites, except their tensors, and the checks of what a site sends."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from fedskew.core.method import Update
from fedskew.core.tensors import Payload
from fedskew.core.text import clean
from fedskew.data.table import ColumnSums, Preparation
from fedskew.deploy.flower.frames import Header
from fedskew.evaluation.scores import ClientScore, Score
from fedskew.evaluation.sent_counts import from_text, to_text

T = TypeVar("T")
PlainScore = tuple[list[int], list[int], float]  # correct and total by class, loss

OWN_DATA = "sites"  # the setting `data` of a run in which sites bring their own data

# What a peer may send. msgspec checks these bounds when it reads a message, before anything is made from it.
LARGEST_FIGURE = 1e30  # of a loss or a time: sums over sites, times their samples, stay finite
# a table of predictions by class, which the server sums, has gigabytes from here on: no site may make it so large
MOST_CLASSES = 10_000
MOST_WORDS = 100_000  # names of categories in a column
MOST_SITES, MOST_ROUNDS = 10_000, 1_000_000
Length = Annotated[int, Meta(ge=1, le=1_000_000)]  # of one dimension of a sample
Shape = Annotated[tuple[Length, ...], Meta(min_length=1, max_length=4)]
Label = Annotated[str, Meta(max_length=200)]
Labels = Annotated[tuple[Label, ...], Meta(max_length=MOST_CLASSES)]
Total = Annotated[int, Meta(ge=0, le=1 << 62)]
Totals = Annotated[tuple[Total, ...], Meta(max_length=1000)]
Moments = Annotated[tuple[float, ...], Meta(max_length=1000)]
Round = Annotated[int, Meta(ge=-1, lt=MOST_ROUNDS)]
Short = Annotated[str, Meta(max_length=300)]
Kind = Literal["uint8", "float32"]


class SiteFacts(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What a site reports about its own data, once: no samples; sums over all pixels, or over a table's columns.

    Fields without a value are not sent: a server of an earlier version would refuse those that it does not know.
    """

    shape: Shape  # of one sample, as it is stored
    kind: Literal["uint8", "float32", "table"]  # images, vectors, or a table
    labels: Labels  # names of its classes
    samples: Total  # training samples
    pixels: Total = 0  # per channel, over all samples; 0: not images
    sums: Totals = ()  # of the pixels, per channel
    squares: Totals = ()  # of the squared pixels, per channel
    columns: Annotated[tuple[ColumnSums, ...], Meta(max_length=10_000)] = ()  # of a table's training samples
    # training samples by class, in the order of `labels`, 0 for a class that is too small to be told (see profile.py);
    # None: not asked for, or this site's operator does not allow it
    counts: Annotated[tuple[Total, ...], Meta(max_length=MOST_CLASSES)] | None = None


class Task(msgspec.Struct, frozen=True):
    """What the data of all sites have in common."""

    shape: Shape  # of one sample
    kind: Kind
    labels: Labels  # a class's number is its position here
    mean: Moments  # to normalise images, per channel; (): not images
    std: Moments
    table: Preparation | None = None  # how a table becomes samples; None: no table


class Request(msgspec.Struct, frozen=True):
    """A request to a site. A site gets one per round; it evaluates first and then trains.

    A request also commits the round before: `base` says which state of the client counts.
    """

    kind: Literal["hello", "work", "done"]  # at the start, a round, the run is over
    run: Annotated[str, Meta(pattern="^[0-9a-f]{8,64}$")]  # identifies the run
    data: Annotated[str, Meta(max_length=4096)]  # the data set that every site splits, or "sites": each brings its own
    client: Annotated[int, Meta(ge=-1, lt=MOST_SITES)] = -1  # the client number of this site
    sites: Annotated[int, Meta(ge=0, le=MOST_SITES)] = 0  # the number of sites
    round: Round = -1
    stage: Annotated[str, Meta(max_length=100)] = ""
    base: Round = -1  # the round whose state of this client counts; -1: it has none
    keep: Round = -1  # the earliest round that the server may go back to
    train: bool = False
    counts: bool = False  # whether to send `Answer.counts`: a server of an earlier version would refuse them
    profile: bool = False  # whether to report `SiteFacts.counts`, to "hello"; a site's operator may not allow it
    evaluate_round: Round = -1  # evaluate the broadcast as the model after this round; -1: do not evaluate
    settings: dict[str, Any] = {}  # the experiment, as in settings.toml
    task: Task | None = None  # with data "sites"
    initial: Annotated[str, Meta(max_length=64)] = ""  # digest of the initial model
    versions: dict[Short, Short] = {}  # of the server's packages that decide the result


class Answer(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A site's answer to a request. The bytes that come with it are the payload of its update.

    `run` and `round` are those of the request: an answer to another one does not count. Fields that have their default
    are not sent.
    """

    lost: Annotated[str, Meta(max_length=2000)] = ""  # why there is no update
    run: Annotated[str, Meta(max_length=64)] = ""
    round: Round = -1
    weight: float = 0.0
    clipped: bool = False  # whether the site shortened its update to a bound of its own (`Policy.clip`)
    metrics: dict[str, float] = {}  # of training
    seconds: float = 0.0  # how long it trained
    shared: PlainScore | None = None  # score of the global model on the client's test samples
    personal: PlainScore | None = None  # score of the personal model
    counts: Annotated[
        list[str], Meta(max_length=2)
    ] = []  # predictions behind `shared` and `personal`, counted; one item if these are the same
    name: Annotated[str, Meta(max_length=63)] = ""  # the name of the site
    versions: dict[Short, Short] = {}  # of the packages that decide the result, to "hello"
    facts: SiteFacts | None = None  # to "hello" with data "sites"


def as_header(message: Request | Answer) -> Header:
    """The message as plain values, ready for JSON."""
    return dict(msgspec.to_builtins(message))


def read(header: Header, kind: type[T]) -> T:
    """The message of type `kind` in a header; ValueError if it is not one."""
    return msgspec.convert(header, kind)


def problem_in(answer: Answer, samples: int | None = None) -> str:
    """Why the numbers in an answer cannot be used; "" if they can. `samples` are the site's, None if not known."""
    numbers = {"weight": answer.weight, "seconds": answer.seconds, **answer.metrics}
    if bad := [name for name, value in numbers.items() if not math.isfinite(value)]:
        return f"sent a value that is not finite as {clean(bad[0], 40)}"
    if bad := [name for name, value in (answer.metrics | {"seconds": answer.seconds}).items() if _is_huge(value)]:
        return f"sent a value above {LARGEST_FIGURE:g} as {clean(bad[0], 40)}"
    if len(answer.metrics) > 100 or any(len(name) > 100 for name in answer.metrics):
        return "sent too many metrics, or too long names: at most 100 of each are allowed"
    if samples is not None and answer.weight > samples:
        return f"sent the weight {answer.weight:g}, but has {samples} training samples"
    return problem_in_facts(answer.facts) if answer.facts is not None else ""


def _is_huge(figure: float) -> bool:
    """Whether sums of such figures could overflow; also if it is not a number."""
    return not abs(figure) <= LARGEST_FIGURE


def problem_in_facts(facts: SiteFacts) -> str:
    """Why what a site reports about its data cannot be true; "" if it can. Types and bounds were checked by `read`."""
    if len(set(facts.labels)) != len(facts.labels) or not facts.labels:
        return "reported no classes, or one of them twice"
    if bad := [label for label in facts.labels if clean(label) != label or not label]:
        return f"reported a class with an unprintable name ({clean(bad[0], 40)})"
    if not facts.samples:
        return "reported no training samples"
    if facts.counts is not None and (why := _problem_in_label_counts(facts.counts, facts)):
        return why
    if facts.kind == "table":
        return _problem_in_columns(facts)
    if facts.columns:
        return "reported columns, but its samples are no table"
    if facts.kind != "uint8":
        return ""
    channels = facts.shape[-1]
    if len(facts.shape) != 3 or len(facts.sums) != channels or len(facts.squares) != channels:
        return f"reported images of shape {list(facts.shape)} with sums of {len(facts.sums)} channels"
    if facts.pixels != facts.samples * facts.shape[0] * facts.shape[1]:
        return f"reported {facts.pixels} pixels for {facts.samples} samples of shape {list(facts.shape)}"
    for total, square in zip(facts.sums, facts.squares, strict=True):  # of numbers from 0 to 255
        if not (total <= square <= 255 * total <= 255 * 255 * facts.pixels and total**2 <= facts.pixels * square):
            return "reported sums that no pixels have"
    return ""


def _problem_in_label_counts(counts: tuple[int, ...], facts: SiteFacts) -> str:
    """Why label counts cannot be true; "" if they can. Samples may be missing from them only if a class has none."""
    if len(counts) != len(facts.labels):
        return f"reported label counts of {len(counts)} classes, but has {len(facts.labels)}"
    if (total := sum(counts)) > facts.samples or (total < facts.samples and 0 not in counts):
        return f"reported label counts of {total} samples, but has {facts.samples}"
    return ""


def _problem_in_columns(facts: SiteFacts) -> str:
    """Why the sums over the columns of a table cannot be true; "" if they can."""
    names = [column.name for column in facts.columns]
    if len(set(names)) != len(names) or facts.shape != (len(names),):
        return f"reported {len(names)} columns for samples of shape {list(facts.shape)}, or one of them twice"
    for column in facts.columns:
        words = [column.name, *column.counts]
        if len(words) > MOST_WORDS or any(len(word) > 200 or clean(word) != word for word in words):
            return f"reported the column {clean(column.name, 40)} with unprintable or too many names"
        if column.rows != facts.samples or column.problem():
            return f"reported the column {column.name}, which {column.problem() or 'has another number of samples'}"
    return ""


def client_score(answer: Answer, client: int, classes: int, trained: bool) -> ClientScore | None:
    """The scores in an answer; None if they are missing or invalid. `trained`: whether this client ever trained."""
    texts = [*answer.counts, "", ""]
    personal: Score | None
    shared = _checked_score(answer.shared, classes, texts[0])
    if answer.shared is not None and shared is None:
        return None
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
    if given is None or len(given[0]) != classes or len(given[1]) != classes or _is_huge(given[2]):
        return None
    if max(given[1], default=0) > 1 << 40:
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
