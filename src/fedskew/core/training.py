"""How local optimisation is done; the same for every method that is compared."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Literal

from msgspec import Meta

from fedskew.core.augment import parse_augment
from fedskew.core.settings import UsageError, parse, unknown

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, lt=1)]


@dataclass(frozen=True)
class Training:
    """Settings of one optimisation.

    `schedule` is the learning rate by round: `constant`; `cosine` (to zero over the run);
    `steps:50=0.01,75=0.001` (from round 50 on lr is 0.01, and so on; a key below 1 is a share of
    the run's rounds); `exponential:rate=0.99` (times the rate each round).

    `batch_norm` is what happens to running statistics: `aggregate` sends them and the server takes
    their weighted mean; `local` leaves them with each client (where a site has none of its own,
    evaluation uses batch statistics); `frozen` never moves them from where they started.
    """

    optimiser: Literal["sgd", "adam"] = "sgd"
    lr: Positive = 0.1
    schedule: str = "constant"
    momentum: Share = 0.0
    weight_decay: NotNegative = 0.0
    batch_size: Count = 32
    epochs: Natural = 1
    steps: Natural | None = None  # takes the place of epochs
    clip: Positive | None = None  # largest norm of a step's gradient
    drop_last: bool = False  # leave out a last, smaller batch; only where a client has a whole one
    augment: str = ""  # e.g. crop:pad=4+flip
    batch_norm: Literal["aggregate", "local", "frozen"] = "aggregate"

    def __post_init__(self) -> None:
        self.rate(0, 1)
        parse_augment(self.augment)

    @lru_cache(maxsize=64)  # noqa: B019  asked for every client; settings are few and live as long as the process
    def at(self, round: int, rounds: int) -> Training:
        """These settings as they are in one round: lr resolved, schedule constant."""
        return replace(self, lr=self.rate(round, rounds), schedule="constant")

    def rate(self, round: int, rounds: int) -> float:
        steps = parse(self.schedule, "schedule")
        name, options = steps[0]
        if len(steps) > 1:
            raise UsageError(f"schedule '{self.schedule}' has more than one part; give one of {', '.join(SCHEDULES)}.")
        try:
            values = {key: float(value) for key, value in options.items()}
        except ValueError:
            raise UsageError(f"schedule '{self.schedule}' has a value that is not a number.") from None
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
        raise UsageError(f"schedule '{self.schedule}' will not do; write it like {SCHEDULES[name]}.")

    def _step(self, values: dict[str, float], round: int, rounds: int) -> float:
        lr = self.lr
        try:
            starts = sorted((float(key), value) for key, value in values.items())
        except ValueError:
            raise UsageError(f"schedule '{self.schedule}' will not do; write it like {SCHEDULES['steps']}.") from None
        for start, value in starts:
            if round >= (start * rounds if start < 1 else start):
                lr = value
        return lr


SCHEDULES = {
    "constant": "constant",
    "cosine": "cosine",
    "exponential": "exponential:rate=0.99",
    "steps": "steps:50=0.01,75=0.001",
}
