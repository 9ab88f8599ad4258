"""What a race may cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Budget:
    """What a race may cost, in seconds of wall-clock time or in rounds of training, and what it has cost."""

    limit: float
    unit: str  # "seconds" or "rounds"
    spent: float = 0.0

    @property
    def left(self) -> float:
        return self.limit - self.spent

    def cost(self, rounds: float, seconds: float) -> float:
        """What some rounds cost, if one takes so many seconds."""
        return rounds if self.unit == "rounds" else rounds * seconds

    def text(self, amount: float) -> str:
        """An amount in words: "3.1 minutes", "120 rounds"."""
        return f"{amount:.0f} rounds" if self.unit == "rounds" else f"{amount / 60:.1f} minutes"


class BudgetUsed(Exception):
    """The budget is used up, or would be by this run."""
