"""Local: every client trains alone. The control that shows what clients reach without federation.

All clients start from the common initial model. A client trains in the rounds in which it is sampled, as in FedAvg.
Nothing is sent, and there is no global model.
"""

from dataclasses import dataclass

from fedskew.core.method import Method


@dataclass(frozen=True)
class Local(Method):
    """Control without federation: every client trains alone, from the common initial model."""

    formula = r"v_i \leftarrow v_i - \eta \, \nabla f_i(v_i)"
    terms_off = None  # nothing is averaged
    personal = ("",)  # every name
    has_global = False
