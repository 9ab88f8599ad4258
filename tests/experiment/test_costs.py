"""What a method costs, in bytes that can be counted by hand."""

from __future__ import annotations

from fedskew.experiment.costs import Costs, extra_bytes, measure_costs
from fedskew.methods import REGISTRY

HEAD = 4 * (200 * 3 + 3)  # bytes of the last layer
BODY = 4 * (4 * 200 + 200 + 200 * 200 + 200)
MODEL = HEAD + BODY


def costs(name: str) -> Costs:
    """On an MLP of 4, 200, 200 and 3 units."""
    return measure_costs(REGISTRY[name](), "mlp", (1, 2, 2), 3)


def test_fedavg_sends_its_model_both_ways_and_keeps_it_on_the_server_only() -> None:
    model = {"parameters": MODEL, "buffers": 0}
    assert costs("fedavg") == Costs(down=model, up=model, client={}, server=model, once={})


def test_a_head_that_stays_with_the_clients_is_nowhere_else() -> None:
    body = {"parameters": BODY, "buffers": 0}
    assert costs("fedper") == Costs(down=body, up=body, client={"parameters": HEAD}, server=body, once={})


def test_what_only_the_server_keeps_is_its_own_cost() -> None:
    """FedAvgM's velocity is never sent."""
    made = costs("fedavgm")
    assert made.server == {"parameters": MODEL, "buffers": 0, "velocity": MODEL}
    assert made.down == made.up == {"parameters": MODEL, "buffers": 0}
    assert extra_bytes(made.server, costs("fedavg").server) == MODEL


def test_the_second_round_is_counted_in_which_what_the_first_made_is_there() -> None:
    """FedGen's server makes its generator in the first round and first sends it in the second."""
    made = costs("fedgen")
    assert made.down["generator"] == made.server["generator"] > 0


def test_a_round_of_another_kind_is_counted_apart() -> None:
    """CCVR's last round sends moments of 200 features for each of 3 classes up: sums, products and counts."""
    made = costs("ccvr")
    assert made.up == {"parameters": MODEL, "buffers": 0}
    assert made.once == {"calibrate": ({"parameters": MODEL, "buffers": 0}, {"moments": 964_824})}
