"""Two settings whose effect is easily lost: LED's temperature, and the epochs of FedCRC's refresh."""

from __future__ import annotations

import pytest
import torch
from torch import tensor
from torch.nn.functional import cross_entropy

from fedskew.core.fit import fit
from fedskew.core.training import Training
from fedskew.methods.fedcrc import FedCRC
from fedskew.methods.fedddc import FedDDC
from helpers.nets import normed, received


@pytest.mark.parametrize("kd", ["dkd", "traditional"])
def test_the_temperature_of_led_leaves_the_cross_entropy_as_it_is(kd: str) -> None:
    """Eq. 22 with lambda 1 is the cross entropy of the student's own logits, whatever T is."""
    student, teacher, y = tensor([[0.3, 0.1, 0.9]]), tensor([[1.0, -0.4, 1.2]]), tensor([2])
    method = FedDDC(kd=kd, lam=1.0, T=3.0)  # type: ignore[arg-type]
    assert float(method.distillation_loss(student, teacher, y)) == pytest.approx(float(cross_entropy(student, y)))


@pytest.mark.parametrize(("epochs", "expected"), [((1, 3, 2), 3), (None, 4)])
def test_fedcrc_refreshes_the_head_for_as_many_epochs_as_it_trains_it(
    epochs: tuple[int, int, int] | None, expected: int
) -> None:
    """The second of the method's epochs, or the training's own; full batches, so the order does not matter."""
    world = normed(FedCRC(eval_refresh=True, epochs=epochs), training=Training(lr=0.1, batch_size=1000, epochs=4))
    model = world.method.personalise(world.site(0, 0, "evaluate"), received(world), {})
    site = world.site(0, 0, "evaluate")
    site.load(received(world))
    fit(site, site.loss, train="head.", epochs=expected)
    for name, t in site.parameters().items():
        assert torch.allclose(model["parameters"][name], t, atol=1e-5), name
