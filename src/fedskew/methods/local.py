"""Local: every client trains alone, from the common initial model. The control: what there is without federation.

Each round a client is in the cohort, it trains as FedAvg's would; there is no server's model.
"""

from dataclasses import dataclass
from typing import ClassVar

from fedskew.core.method import Method


@dataclass(frozen=True)
class Local(Method):
    personal: ClassVar[tuple[str, ...]] = ("",)  # every name
    has_global: ClassVar[bool] = False
