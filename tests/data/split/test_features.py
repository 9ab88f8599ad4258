"""Colour, resolution and concept: each client's own view of its samples."""

from __future__ import annotations

import numpy as np
import pytest

from fedskew.core.settings import UsageError
from fedskew.data.sources.loading import load
from fedskew.data.split.chain import make_partition
from fedskew.data.split.features import at_resolution, changed_samples, with_cast
from fedskew.data.split.partition import Partition
from fedskew.experiment.assemble import assemble
from fedskew.experiment.config import Experiment

Y = np.array([0, 1, 2, 0, 1, 2])


def test_a_cast_raises_red_and_lowers_blue_and_stops_at_255() -> None:
    pixel = np.array([[[[100, 100, 100]], [[200, 7, 3]]]], np.uint8)
    assert with_cast(pixel, 0.5).tolist() == [[[[150, 100, 50]], [[255, 7, 2]]]]
    assert with_cast(pixel[..., :1], -0.5).tolist() == [[[[50]], [[100]]]]


def test_blocks_of_a_coarser_image_have_their_mean() -> None:
    """3 x 3 in blocks of 2: one of four, two of two, one of one."""
    image = np.array([[1, 3, 10], [5, 7, 20], [2, 4, 9]], np.uint8)[None, :, :, None]
    wanted = [[4, 4, 15], [4, 4, 15], [3, 3, 9]]
    assert at_resolution(image, 2)[0, :, :, 0].tolist() == wanted
    assert at_resolution(image, 1) is image


def test_casts_go_from_minus_level_to_level_and_resolutions_by_powers_of_two() -> None:
    partition = make_partition("iid:clients=3+colour:level=0.4+resolution:levels=2", Y, seed=0)
    assert partition.colour == pytest.approx((-0.4, 0.0, 0.4))
    assert partition.resolution == (1, 2, 1)
    assert partition.features_differ
    assert not make_partition("iid:clients=3", Y, seed=0).features_differ


def test_a_concept_shift_relabels_its_clients_and_nobody_else() -> None:
    partition = make_partition("iid:clients=3+concept:groups=2", Y, seed=0)
    _, y = changed_samples(np.zeros((6, 2)), Y, partition, 3)
    for client, shift in enumerate((0, 1, 0)):
        samples = partition.clients[client]
        assert y[samples].tolist() == ((Y[samples] + shift) % 3).tolist()
    assert Y.tolist() == [0, 1, 2, 0, 1, 2]  # not changed


def test_a_world_has_each_clients_own_view_and_the_test_set_is_as_it_was() -> None:
    plain = assemble(Experiment(split="iid:clients=4"))
    skewed = assemble(Experiment(split="iid:clients=4+resolution:levels=2+concept:groups=2"))
    for client in range(4):
        a, b = (w.world.pool(w.world.train[client], client) for w in (plain, skewed))
        assert bool((a.labels == b.labels).all()) == (client % 2 == 0)
        assert bool((a.x[a.index] == b.x[b.index]).all()) == (client % 2 == 0)
    assert (plain.world.x_test == skewed.world.x_test).all()
    assert (plain.world.y_test == skewed.world.y_test).all()
    digits = load("digits")
    assert (plain.world.y.numpy() == digits.y_train).all()  # the data set itself is not changed


def test_tables_have_no_colour_and_shared_samples_no_view_of_their_own() -> None:
    own = make_partition("iid:clients=3+colour", Y, seed=0)
    with pytest.raises(UsageError, match="expected a data set of images"):
        changed_samples(np.zeros((6, 2), np.float32), Y, own, 3)
    shared = Partition((np.array([0, 1]), np.array([1, 2])), np.empty(0, np.int64), concept=(0, 1))
    with pytest.raises(UsageError, match="no two clients share a sample"):
        changed_samples(np.zeros((6, 2)), Y, shared, 3)


@pytest.mark.parametrize("text", ["colour:level=1", "resolution:levels=0", "concept:groups=1"])
def test_settings_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is invalid: expected"):
        make_partition(f"iid:clients=3+{text}", Y, seed=0)
