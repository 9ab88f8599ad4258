"""The fast layers against torch's own: values, gradients, ties, memory formats."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedskew.models import build
from fedskew.models.layers import BatchNorm, ConvPool, Layers, ReluPool, _PhasedConvPool, max_pool

pytestmark = pytest.mark.usefixtures("one_thread")
PLAIN = Layers(fast=False)

# inputs, outputs, padding, batch: one case for each algorithm of ConvPool
CASES = {
    "native, colour": (3, 6, 0, 4),
    "native": (6, 16, 0, 10),
    "phased, one channel": (1, 6, 0, 20),
    "phased, one channel, padded": (1, 6, 2, 3),
    "phased, colour": (3, 6, 2, 10),
    "narrow": (6, 16, 0, 20),
    "wide": (3, 32, 2, 5),
}


def phased(x: Tensor, weight: Tensor, bias: Tensor, padding: int = 0) -> Tensor:
    result: Tensor = _PhasedConvPool.apply(x, weight, bias, (padding, padding))  # type: ignore[no-untyped-call]
    return result


def learn(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def conv_relu_pool(x: Tensor, weight: Tensor, bias: Tensor, padding: int = 0) -> Tensor:
    return F.max_pool2d(F.relu(F.conv2d(x, weight, bias, padding=padding)), 2)


def gradients(function: Any, tensors: list[Tensor], *rest: Any) -> tuple[Tensor, ...]:
    """The result and the gradients of a fixed random weighting of it."""
    leaves = [tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_() for tensor in tensors]
    result = function(*leaves, *rest)
    weighting = torch.randn(result.shape, generator=torch.Generator().manual_seed(5), dtype=result.dtype)
    return result.detach(), *torch.autograd.grad(result, leaves, weighting)


def close(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()) + 1e-7)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [(12, 12), (13, 12), (12, 15), (17, 13)])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided"])
def test_conv_pool_fast_is_conv_pool_plain(case: str, size: tuple[int, int], layout: str) -> None:
    inputs, outputs, padding, batch = CASES[case]
    fast, plain = ConvPool(inputs, outputs, padding, Layers()), ConvPool(inputs, outputs, padding, PLAIN)
    plain.load_state_dict(fast.state_dict())
    x = torch.randn(batch, inputs, *size, generator=torch.Generator().manual_seed(0))
    given = x.contiguous(memory_format=torch.channels_last)
    if layout == "contiguous":
        given = x
    if layout == "strided":
        given = torch.stack((x, x), -1)[..., 0]
    parameters = dict(fast.named_parameters())

    def run(layer: ConvPool) -> Any:
        return lambda x, weight, bias: torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    theirs = gradients(run(plain), [x, *parameters.values()])
    close(gradients(run(fast), [given, *parameters.values()]), theirs)
    with torch.no_grad():
        torch.testing.assert_close(fast(given), theirs[0])


def test_each_case_of_conv_pool_uses_the_convolution_meant_for_it() -> None:
    """Which convolution computes: native, phased (stride 2) or torch's (stride 1)."""
    seen: dict[str, set[str]] = {}
    for case, (inputs, outputs, padding, batch) in CASES.items():
        layer = ConvPool(inputs, outputs, padding, Layers())
        with torch.profiler.profile() as profile:
            layer(torch.zeros(batch, inputs, 12, 12))
        seen[case] = {event.key for event in profile.key_averages()}
    assert [case for case in CASES if "aten::_slow_conv2d_forward" in seen[case]] == ["native, colour", "native"]
    phases = [case for case in CASES if "_PhasedConvPool" in seen[case]]
    assert phases == ["phased, one channel", "phased, one channel, padded", "phased, colour"]
    assert [case for case in phases if "aten::bmm" in seen[case]] == phases[:2]


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("size", [(6, 6), (7, 6), (7, 9)])
def test_the_phased_convolution_passes_gradcheck(channels: int, padding: int, size: tuple[int, int]) -> None:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(2, channels, *size, generator=g, dtype=torch.double, requires_grad=True)
    weight = torch.randn(2, channels, 5, 5, generator=g, dtype=torch.double, requires_grad=True)
    bias = torch.randn(2, generator=g, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, weight, bias: phased(x, weight, bias, padding), (x, weight, bias))


@pytest.mark.parametrize("wanted", range(1, 8))
def test_any_subset_of_gradients_can_be_computed(wanted: int) -> None:
    tensors = [torch.randn(2, 1, 9, 9), torch.randn(3, 1, 5, 5), torch.randn(3)]
    for i, tensor in enumerate(tensors):
        tensor.requires_grad_(bool(wanted >> i & 1))
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    x, weight, bias = tensors
    ours = torch.autograd.grad(phased(x, weight, bias).square().sum(), leaves)
    close(ours, torch.autograd.grad(conv_relu_pool(x, weight, bias).square().sum(), leaves))


def test_the_gradient_of_a_tie_goes_where_torch_sends_it() -> None:
    """Whole numbers in -1..1 and a kernel of one 1 tie in most pools; every sum is exact, so equality is too."""
    g = torch.Generator().manual_seed(0)
    x = torch.randint(-1, 2, (4, 1, 16, 17), generator=g).float()
    weight = torch.zeros(2, 1, 5, 5)
    weight[0, 0, 2, 2] = weight[1, 0, 0, 4] = 1
    bias = torch.tensor([0.0, 1.0])
    pools = F.conv2d(x, weight, bias).unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2)
    ties = (pools == pools.amax(-1, keepdim=True)).sum(-1)
    assert all((ties == n).any() for n in (2, 3, 4))
    ours, theirs = gradients(phased, [x, weight, bias]), gradients(conv_relu_pool, [x, weight, bias])
    assert all(torch.equal(a, b) for a, b in zip(ours[:2], theirs[:2], strict=True))
    close(ours[2:], theirs[2:])


def test_second_derivatives_raise_an_error() -> None:
    x = torch.randn(2, 1, 9, 9, requires_grad=True)
    y = phased(x, torch.randn(3, 1, 5, 5), torch.zeros(3)).square().sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        learn(grad.sum())


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [(8, 8), (9, 6), (5, 7), (2, 3)])
def test_relu_after_the_pool_is_bit_identical(memory_format: torch.memory_format, size: tuple[int, int]) -> None:
    x = torch.randint(-2, 3, (3, 16, *size)).float().contiguous(memory_format=memory_format)
    ours, theirs = gradients(ReluPool(Layers()), [x]), gradients(ReluPool(PLAIN), [x])
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    with torch.no_grad():
        assert torch.equal(ReluPool(Layers())(x), theirs[0])


def test_the_pool_without_gradients_equals_torch_s() -> None:
    x = torch.randn(2, 3, 7, 5)
    with torch.inference_mode():
        assert torch.equal(max_pool(x), F.max_pool2d(x, 2))


def test_batch_norm_of_one_image_uses_the_values_of_the_image() -> None:
    """Four values a channel: as torch's, and the running statistics move."""
    ours, theirs = BatchNorm(3), torch.nn.BatchNorm2d(3)
    x = torch.randn(1, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours.running_mean, theirs.running_mean)


def test_batch_norm_of_a_single_value_uses_the_running_statistics() -> None:
    """mean 2, variance 4, epsilon 1e-5: (6 - 2) / sqrt(4 + 1e-5) = 1.9999975, and the statistics stay."""
    norm = BatchNorm(1)
    norm.running_mean, norm.running_var = torch.tensor([2.0]), torch.tensor([4.0])
    assert float(norm(torch.full((1, 1, 1, 1), 6.0)).detach()) == pytest.approx(1.9999975, abs=1e-6)
    assert (float(norm.running_mean), float(norm.running_var)) == (2.0, 4.0)


def test_batch_norm_of_several_values_equals_torch_s() -> None:
    ours, theirs = BatchNorm(3), torch.nn.BatchNorm2d(3)
    for x in torch.randn(4, 2, 3, 1, 1):
        assert torch.equal(ours(x), theirs(x))
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), theirs.buffers(), strict=True))


@pytest.mark.parametrize("name", ["simple-cnn", "cnn", "cnn4", "resnet8"])
def test_a_fast_net_can_train_as_views_of_one_flat_buffer(name: str) -> None:
    """Parameters as views of one buffer, gradients of another: nothing may be cached or replaced."""
    flat, usual = build(name, (3, 16, 16), 4, seed=1), build(name, (3, 16, 16), 4, seed=1)
    size = sum(p.numel() for p in flat.parameters())
    values, grads, start = torch.empty(size), torch.zeros(size), 0
    for p in flat.parameters():
        view, grad = (t[start : start + p.numel()].as_strided(p.shape, p.stride(), start) for t in (values, grads))
        view.copy_(p.data)
        p.data, p.grad = view, grad
        start += p.numel()
    g = torch.Generator().manual_seed(0)
    for batch in (4, 16):
        x, y = torch.randn(batch, 3, 16, 16, generator=g), torch.randint(4, (batch,), generator=g)
        grads.zero_()
        usual.zero_grad()
        for net in (flat, usual):
            learn(F.cross_entropy(net(x.contiguous(memory_format=torch.channels_last)), y))
        values -= 0.1 * grads
        for a, b in zip(flat.parameters(), usual.parameters(), strict=True):
            assert b.grad is not None
            b.data -= 0.1 * b.grad
            assert torch.equal(a, b)


def test_wide_convolutions_are_channels_last_and_narrow_ones_are_not() -> None:
    def formats(name: str, fast: bool) -> set[bool]:
        net = build(name, (3, 32, 32), 10, seed=0, fast=fast)
        weights = [p for p in net.parameters() if p.ndim == 4]
        return {w.is_contiguous(memory_format=torch.channels_last) for w in weights}

    assert formats("cnn", True) == formats("resnet8", True) == {True}
    assert formats("simple-cnn", True) == {False}
    assert formats("cnn", False) == {False}


def test_a_net_put_into_channels_last_by_the_user_computes_the_same() -> None:
    net = build("simple-cnn", (1, 16, 16), 3, seed=0)
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    plain = build("simple-cnn", (1, 16, 16), 3, seed=0, fast=False)
    for batch in (3, 20):
        x = torch.randn(batch, 1, 16, 16)
        x = x.as_strided(x.shape, (256, 1, 16, 1))
        for n in (net, plain):
            n.zero_grad()
            n(x).square().sum().backward()
        close(
            tuple(p.grad for p in net.parameters() if p.grad is not None),
            tuple(p.grad for p in plain.parameters() if p.grad is not None),
        )
