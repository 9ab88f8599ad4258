"""How each client trains; the same for every method in a comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Literal

from msgspec import Meta

from fedskew.core.augment import parse_augment
from fedskew.core.settings import UsageError, parse, unknown

Count = Annotated[int, Meta(ge=1)]
Rounds = Annotated[int, Meta(ge=1, le=1_000_000)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, lt=1)]


@dataclass(frozen=True)
class Training:
    """Settings of local training.

    optimiser: "sgd" or "adam".
    lr: learning rate of round 0.
    schedule: the learning rate by round: "constant"; "cosine" (to zero over the run); "steps:50=0.01,75=0.001" (0.01
        from round 50 on, 0.001 from round 75 on, counted from 0; a key below 1 is a fraction of the run's rounds);
        "exponential:rate=0.99" (times the rate each round).
    momentum: of SGD; 0 is plain SGD. Adam does not use it.
    weight_decay: weight of |w|^2 / 2 in the loss; 0 is none.
    batch_size: samples per step.
    epochs: passes over a client's samples in one round, at least 1.
    steps: steps in one round, at least 1, instead of epochs; None uses epochs.
    clip: largest norm of a step's gradient; None does not clip.
    drop_last: skip an epoch's last batch if it is smaller, unless it is the only one.
    augment: random changes to images, such as "crop:pad=4+flip"; "" is none.
    batch_norm: what happens to running statistics. "aggregate" sends them, and the server averages them like weights;
        "local" keeps them on each client (a site without its own evaluates with batch statistics);
        "frozen" leaves them at their initial values.
    precision: "float32", or "bf16": the body of the net computes its training steps in bfloat16, which is faster on
        CPUs with AVX512-BF16 or AMX and on GPUs, but not for small nets such as simple-cnn. Parameters, losses and
        evaluation stay float32. Results differ.

    >>> training = Training(lr=0.1, schedule="steps:50=0.01", augment="flip")
    >>> training.rate(49, 100), training.rate(50, 100)
    (0.1, 0.01)
    """

    optimiser: Literal["sgd", "adam"] = "sgd"
    lr: Positive = 0.1
    schedule: str = "constant"
    momentum: Share = 0.0
    weight_decay: NotNegative = 0.0
    batch_size: Count = 32
    epochs: Count = 1
    steps: Count | None = None
    clip: Positive | None = None
    drop_last: bool = False
    augment: str = ""
    batch_norm: Literal["aggregate", "local", "frozen"] = "aggregate"
    precision: Literal["float32", "bf16"] = "float32"

    def __post_init__(self) -> None:
        texts: tuple[object, ...] = (self.schedule, self.augment)
        if not all(isinstance(text, str) for text in texts):
            return  # `checked` says so
        for name in ("lr", "weight_decay"):
            if getattr(self, name) == math.inf:
                raise UsageError(f"training: {name}=inf is invalid: expected a finite number.")
        self.rate(0, 1)
        parse_augment(self.augment)

    @lru_cache(maxsize=64)  # noqa: B019  called for every client; settings are few and live as long as the process
    def at(self, round: int, rounds: int) -> Training:
        """The settings of one round: lr is that of the round, the schedule is constant. `rounds`: rounds of the run."""
        return replace(self, lr=self.rate(round, rounds), schedule="constant")

    def rate(self, round: int, rounds: int) -> float:
        """The learning rate of a round, counted from 0, in a run of `rounds` rounds."""
        steps = parse(self.schedule, "schedule")
        name, options = steps[0]
        if len(steps) > 1:
            raise UsageError(
                f"schedule '{self.schedule}' has more than one part: expected one of {', '.join(SCHEDULES)}."
            )
        try:
            values = {key: float(value) for key, value in options.items()}
        except ValueError:
            raise UsageError(f"schedule '{self.schedule}' is invalid: expected numbers as values.") from None
        if not all(0 <= value < math.inf for value in values.values()):
            raise UsageError(f"schedule '{self.schedule}' is invalid: expected finite numbers of at least 0 as values.")
        if name == "constant" and not values:
            return self.lr
        if name == "cosine" and not values:
            return self.lr * 0.5 * (1 + math.cos(math.pi * round / max(rounds, 1)))
        if name == "exponential" and values.keys() == {"rate"}:
            return self.lr * float(values["rate"] ** round)
        if name == "steps" and values:
            return self._step(values, round, rounds)
        if name not in SCHEDULES:
            raise unknown("schedule", name, SCHEDULES)
        raise self._invalid(name)

    def _step(self, values: dict[str, float], round: int, rounds: int) -> float:
        lr = self.lr
        try:
            starts = sorted((float(key), value) for key, value in values.items())
        except ValueError:
            raise self._invalid("steps") from None
        for start, value in starts:
            if round >= (start * rounds if start < 1 else start):
                lr = value
        return lr

    def _invalid(self, name: str) -> UsageError:
        return UsageError(f"schedule '{self.schedule}' is invalid: expected something like {SCHEDULES[name]}.")


SCHEDULES = {  # name -> an example
    "constant": "constant",
    "cosine": "cosine",
    "exponential": "exponential:rate=0.99",
    "steps": "steps:50=0.01,75=0.001",
}
