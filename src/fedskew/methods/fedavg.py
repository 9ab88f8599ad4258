"""FedAvg: Communication-Efficient Learning of Deep Networks from Decentralized Data.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas. AISTATS 2017. arXiv:1602.05629

Algorithm 1: w_{t+1} = sum_{k in S_t} (n_k / n) w^k_{t+1},  n = sum of n_k over the cohort S_t
"""

from dataclasses import dataclass

from fedskew.method import Method


@dataclass(frozen=True)
class FedAvg(Method):
    """`Method` is FedAvg: it answers every question the plain way."""
