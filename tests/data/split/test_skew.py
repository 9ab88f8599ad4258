"""The figures of a partition, worked by hand, and its picture."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.spatial.distance import jensenshannon

from fedskew.data.split.chain import make_partition
from fedskew.data.split.partition import Partition
from fedskew.data.split.plot import plot_partition
from fedskew.data.split.skew import feature_skew, gini_coefficient, jensen_shannon, skew
from fedskew.experiment.config import Experiment
from fedskew.experiment.run import Run

NOTHING = np.empty(0, np.int64)


def test_the_figures_of_two_clients_by_hand() -> None:
    """Client 0 has 0,0,1,1 and client 1 has 1,1,1,1: all together a quarter 0.

    Entropies log 2 and 0; distances |.5-.25| and |0-.25|; sizes alike; class totals 2 and 6.
    """
    y = np.array([0, 0, 1, 1, 1, 1, 1, 1])
    found = skew(Partition((np.arange(4), np.arange(4, 8)), NOTHING), y)
    assert found.table.tolist() == [[2, 2], [0, 4]]
    assert found.sizes.tolist() == [4, 4]
    assert found.classes.tolist() == [2, 1]
    assert found.entropy == pytest.approx([math.log(2), 0])
    assert found.distance == pytest.approx([0.25, 0.25])
    assert found.mean_entropy == pytest.approx(math.log(2) / 2)
    assert found.mean_distance == pytest.approx(0.25)
    assert found.gini == 0
    assert found.imbalance == 3


def test_distance_is_to_the_mix_of_the_clients_without_the_public_set() -> None:
    """Clients hold 0,0 and 1,1: each is half away; the public set of 2s does not count, nor as a class of the tail."""
    y = np.array([0, 0, 1, 1, 2, 2, 2])
    found = skew(Partition((np.array([0, 1]), np.array([2, 3])), np.array([4, 5, 6])), y, classes=4)
    assert found.table.tolist() == [[2, 0, 0, 0], [0, 2, 0, 0]]
    assert found.distance.tolist() == [0.5, 0.5]
    assert found.imbalance == 1


def test_gini_by_hand() -> None:
    """Sizes 1 and 3: mean difference 1 over twice the mean 2. One of four has all: 3/4."""
    assert gini_coefficient(np.array([3, 1])) == pytest.approx(0.25)
    assert gini_coefficient(np.array([0, 0, 8, 0])) == pytest.approx(0.75)
    assert gini_coefficient(np.array([5, 5, 5])) == 0


def test_labels_need_not_be_contiguous_and_a_client_may_be_empty() -> None:
    found = skew(Partition((np.array([0, 2]), NOTHING), NOTHING), np.array([9, 3, 7]))
    assert found.table.tolist() == [[0, 1, 1], [0, 0, 0]]
    assert found.entropy == pytest.approx([math.log(2), 0])


def test_a_smaller_alpha_is_more_skewed() -> None:
    y = np.repeat(np.arange(10), 200)
    mild, strong = (skew(make_partition(f"dirichlet-mix:alpha={alpha}", y, seed=0), y) for alpha in (10, 0.1))
    assert strong.mean_distance > mild.mean_distance + 0.2
    assert strong.mean_entropy < mild.mean_entropy - 0.5


def test_the_figures_survive_json() -> None:
    y = np.repeat(np.arange(3), 20)
    found = skew(make_partition("iid:clients=4", y, seed=0), y)
    again = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert again == found.as_dict()
    assert list(again) == [
        *("table", "sizes", "classes", "entropy", "distance"),
        *("mean_entropy", "mean_distance", "gini", "imbalance"),
        *("mean_hellinger", "mean_jensen_shannon", "mean_effective", "empty"),
    ]


@pytest.mark.parametrize(("text", "classes"), [("iid:clients=3", 3), ("dirichlet-mix:clients=250", 12)])
def test_the_picture_is_a_png_with_a_light_background_and_ink(text: str, classes: int, tmp_path: Path) -> None:
    y = np.repeat(np.arange(classes), 60)
    plot_partition(make_partition(text, y, seed=0), y, classes, tmp_path / "split.png")
    with Image.open(tmp_path / "split.png") as image:
        assert image.format == "PNG"
        pixels = np.asarray(image.convert("RGB")).astype(int)
    assert (pixels[0, 0] == 255).all()
    coloured = pixels.max(axis=2) - pixels.min(axis=2) > 30  # dots and bars, not the axes
    dots, bars = np.array_split(coloured, 2, axis=1)
    assert dots.mean() > 0.005
    assert bars.mean() > 0.05


def test_distances_to_the_global_mix_by_hand() -> None:
    """Clients of 0,0 and 1,1: mix (1, 0) beside (1/2, 1/2).

    Hellinger sqrt(1 - sqrt(1/2)). Jensen-Shannon, with the middle (3/4, 1/4): half of
    log2(4/3) + (log2(2/3) + log2(2)) / 2.
    One class each is 1 effective class; two of four cells are empty.
    """
    found = skew(Partition((np.array([0, 1]), np.array([2, 3])), NOTHING), np.array([0, 0, 1, 1])).summary()
    assert found["total_variation"] == 0.5
    assert found["hellinger"] == pytest.approx(math.sqrt(1 - math.sqrt(0.5)))
    divergence = (math.log2(4 / 3) + math.log2(2 / 3) / 2 + math.log2(2) / 2) / 2
    assert found["jensen_shannon"] == pytest.approx(math.sqrt(divergence))
    assert (found["effective_classes"], found["empty_cells"], found["clients"]) == (1, 0.5, 2)


def test_clients_with_the_global_mix_have_no_label_skew_and_empty_ones_do_not_count() -> None:
    partition = Partition((np.array([0, 2]), np.array([1, 3]), NOTHING), NOTHING)
    found = skew(partition, np.array([0, 0, 1, 1]), classes=3).summary()
    assert (found["hellinger"], found["jensen_shannon"]) == pytest.approx((0, 0), abs=1e-7)
    assert found["effective_classes"] == pytest.approx(2)
    assert found["empty_cells"] == pytest.approx(1 / 3)


def test_the_share_of_variance_between_clients_by_hand() -> None:
    """One class: 0, 2 at one client and 4, 6 at the other. Within 2 + 2 = 4 of 20 in all.

    Adjusted for two cells of four samples: 1 - (4 / 2) / (20 / 3) = 0.7. Swapped so that means agree it is 0.
    """
    y, clients = np.zeros(4, int), np.array([0, 0, 1, 1])
    assert feature_skew(np.array([[0.0], [2.0], [4.0], [6.0]]), y, clients) == pytest.approx(0.7)
    assert feature_skew(np.array([[0.0], [6.0], [2.0], [4.0]]), y, clients) == 0
    assert feature_skew(np.zeros((4, 1)), y, clients) is None
    assert feature_skew(np.ones((2, 1)), y[:2], np.array([0, 1])) is None


def test_what_differs_between_classes_is_not_feature_skew() -> None:
    """Client 0 has class 0 only and client 1 class 1 only: classes differ, but no class differs between clients."""
    x = np.array([[0.0], [1.0], [8.0], [9.0]])
    assert feature_skew(x, np.array([0, 0, 1, 1]), np.array([0, 0, 1, 1])) == 0


def test_samples_split_at_random_have_no_feature_skew_on_average() -> None:
    rng = np.random.RandomState(0)
    found = [feature_skew(rng.randn(60, 5), rng.randint(3, size=60), rng.randint(4, size=60)) for _ in range(20)]
    assert np.mean(found) < 0.03


def test_noise_and_rotation_show_as_feature_skew(fedskew: Any) -> None:
    plain = fedskew("split", "iid:clients=4", "--json").json()
    turned = fedskew("split", "iid:clients=4+rotate:turns=4", "--json").json()
    assert plain["features"] < 0.02
    assert turned["features"] > plain["features"] + 0.05
    shown = fedskew("split", "iid:clients=4").out
    for words in ("Hellinger", "Jensen-Shannon", "empty (client, class) cells", "effective classes", "feature skew"):
        assert words in shown


def test_a_run_keeps_how_skewed_its_clients_are() -> None:
    run = Run(Experiment(split="iid:clients=3", model="mlp:hidden=4", rounds=1))
    list(run)
    assert run.result is not None
    assert run.result.skew["clients"] == 3
    assert run.result.skew["features"] is not None


def test_the_jensen_shannon_distance_is_that_of_scipy() -> None:
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet([0.1] * 10, 50), rng.dirichlet([1.0] * 10)
    p[0], p[1] = q, np.eye(10)[3]
    assert jensen_shannon(p, q[None]) == pytest.approx(jensenshannon(p, q[None], base=2, axis=1), abs=1e-7)
