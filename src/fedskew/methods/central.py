"""Central: one client that holds everybody's training data. The control: what federation costs.

It trains as long as all clients together: the same epochs a round, over all samples at once.
"""

from dataclasses import dataclass
from typing import ClassVar

from fedskew.core.method import Method


@dataclass(frozen=True)
class Central(Method):
    pooled: ClassVar[bool] = True
