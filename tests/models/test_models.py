"""Nets: parameter counts as published, shapes, seeds, options and errors."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedskew.core.settings import UsageError
from fedskew.models import REGISTRY, Net, build, listing, wrap
from fedskew.models.efficientnet import MBConv, Squeeze
from fedskew.models.layers import Layers
from fedskew.models.wrn import Block, WrnOptions

pytestmark = pytest.mark.usefixtures("one_thread")
CIFAR, MNIST, SKIN = (3, 32, 32), (1, 28, 28), (3, 200, 200)

# net, options, input, classes: feature size, parameters, state (parameters and buffers), parameters of the head
PUBLISHED: list[tuple[str, dict[str, Any], tuple[int, ...], int, int, int, int, int]] = [
    ("simple-cnn", {}, CIFAR, 10, 256, 92_626, 92_626, 2_570),
    ("simple-cnn", {}, CIFAR, 30, 256, 97_766, 97_766, 7_710),
    ("simple-cnn", {"projection": False}, CIFAR, 10, 84, 62_006, 62_006, 850),
    ("simple-cnn", {}, MNIST, 26, 256, 79_158, 79_158, 6_682),
    ("simple-cnn", {}, MNIST, 78, 256, 92_522, 92_522, 20_046),
    ("mlp", {}, MNIST, 10, 200, 199_210, 199_210, 2_010),
    ("cnn", {}, MNIST, 10, 512, 1_663_370, 1_663_370, 5_130),
    ("cnn", {}, CIFAR, 10, 512, 2_156_490, 2_156_490, 5_130),
    ("cnn", {"hidden": 2048}, MNIST, 62, 2048, 6_603_710, 6_603_710, 127_038),
    ("cnn", {"padding": False}, MNIST, 10, 512, 582_026, 582_026, 5_130),
    ("cnn", {"channels": "64-64", "hidden": "384-192", "padding": False}, CIFAR, 10, 192, 797_962, 797_962, 1_930),
    ("cnn", {"channels": "64-64", "hidden": "384-192", "padding": False}, CIFAR, 100, 192, 815_332, 815_332, 19_300),
    ("cnn4", {}, MNIST, 10, 64, 112_586, 112_586, 650),
    ("cnn4", {}, CIFAR, 10, 256, 115_658, 115_658, 2_570),
    # width 32: 1 * 32 * 9 + 32, three times 32 * 32 * 9 + 32, four norms of 64; the head 32 * 10 + 10
    ("cnn4", {"width": 32}, MNIST, 10, 32, 28_650, 28_650, 330),
    ("cnn4", {"width": 32}, CIFAR, 10, 128, 30_186, 30_186, 1_290),
    ("cnn4", {"track": True}, MNIST, 10, 64, 112_586, 113_102, 650),
    ("cnn4", {"track": True}, CIFAR, 10, 256, 115_658, 116_174, 2_570),
    ("convnet5", {}, MNIST, 62, 128, 1_161_278, 1_162_115, 391_230),
    ("convnet5", {"hidden": 256}, MNIST, 62, 128, 819_006, 819_843, 48_958),
    ("convnet5", {"hidden": 256}, (1, 32, 32), 62, 128, 819_006, 819_843, 48_958),
    ("resnet8", {}, CIFAR, 10, 256, 1_227_594, 1_230_291, 2_570),
    ("resnet8", {}, CIFAR, 100, 256, 1_250_724, 1_253_421, 25_700),
    ("resnet8", {"width": 16}, CIFAR, 10, 64, 78_042, 78_723, 650),
    ("resnet18", {}, CIFAR, 10, 512, 11_173_962, 11_183_582, 5_130),
    ("resnet18", {}, CIFAR, 100, 512, 11_220_132, 11_229_752, 51_300),
    ("resnet18", {}, MNIST, 10, 512, 11_172_810, 11_182_430, 5_130),
    ("resnet18", {"projection": True}, CIFAR, 10, 256, 11_565_386, 11_575_006, 2_570),
    ("resnet18", {"stem": "imagenet"}, CIFAR, 10, 512, 11_181_642, 11_191_262, 5_130),
    ("resnet18", {"stem": "imagenet"}, CIFAR, 100, 512, 11_227_812, 11_237_432, 51_300),
    ("resnet50", {}, CIFAR, 100, 2048, 23_705_252, 23_758_425, 204_900),
    ("resnet50", {"stem": "imagenet"}, CIFAR, 100, 2048, 23_712_932, 23_766_105, 204_900),
    ("resnet50", {"projection": True}, CIFAR, 100, 256, 28_246_948, 28_300_121, 25_700),
    ("resnet50", {"projection": True}, CIFAR, 300, 256, 28_298_348, 28_351_521, 77_100),
    ("wrn28-10", {}, CIFAR, 100, 640, 36_546_980, 36_564_957, 64_100),
    ("wrn28-10", {"bias": False}, CIFAR, 100, 640, 36_536_884, 36_554_861, 64_100),
    ("efficientnet-b0", {"projection": 640}, SKIN, 8, 640, 4_832_516, 4_874_581, 5_128),
    ("efficientnet-b0", {}, SKIN, 8, 1280, 4_017_796, 4_059_861, 10_248),
    ("efficientnet-b0", {}, SKIN, 1000, 1280, 5_288_548, 5_330_613, 1_281_000),
]
# one cheap member of every family, for tests that compute: net, options, input
CHEAP: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("mlp", {"hidden": 8}, (5,)),
    ("cnn", {"channels": "4-8", "hidden": 16}, (1, 13, 14)),
    ("simple-cnn", {}, (3, 17, 16)),
    ("cnn4", {}, (3, 16, 17)),
    ("convnet5", {"hidden": 16}, (1, 28, 28)),
    ("resnet8", {"width": 4}, (3, 7, 9)),
    ("wrn28-10", {"depth": 10, "widen": 1}, (3, 8, 8)),
    ("efficientnet-b0", {"projection": 16}, (3, 9, 8)),
]
NORMED = [case for case in CHEAP if REGISTRY[case[0]].normed]


def count(tensors: Any) -> int:
    return sum(tensor.numel() for tensor in tensors)


def make(name: str, options: dict[str, Any], shape: tuple[int, ...], **more: Any) -> Net:
    return build(name, shape, 3, seed=7, **more, **options)


@pytest.mark.parametrize(("name", "options", "shape", "classes", "features", "params", "state", "head"), PUBLISHED)
@pytest.mark.parametrize("fast", [True, False])
def test_sizes_are_the_published_ones(
    name: str, options: Any, shape: Any, classes: int, features: int, params: int, state: int, head: int, fast: bool
) -> None:
    with torch.device("meta"), torch.no_grad():
        net = build(name, shape, classes, seed=0, fast=fast, **options)
        net.eval()
        z = net.body(torch.empty(1, *shape))
    assert count(net.parameters()) == params
    assert count(net.state_dict().values()) == state
    assert count(net.head.parameters()) == head
    assert net.features == features
    assert z.shape == (1, features)
    assert net.head(z).shape == (1, classes)
    assert {key.split(".")[0] for key in net.state_dict()} == {"body", "head"}


def test_every_net_has_a_published_size() -> None:
    assert {row[0] for row in PUBLISHED} == set(REGISTRY) - {"linear"}  # which has no body, and no paper


@pytest.mark.parametrize(("name", "options", "shape"), CHEAP)
@pytest.mark.parametrize("fast", [True, False])
def test_a_batch_of_one_trains_and_keeps_its_batch_dimension(name: str, options: Any, shape: Any, fast: bool) -> None:
    net = make(name, options, shape, fast=fast)
    logits = net(torch.randn(1, *shape, generator=torch.Generator().manual_seed(0)))
    assert logits.shape == (1, 3)
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    assert all(value.isfinite().all() for value in net.state_dict().values())


@pytest.mark.parametrize(("name", "options", "shape"), CHEAP)
def test_fast_and_plain_agree_in_values_gradients_and_state(name: str, options: Any, shape: Any) -> None:
    """In double where batch norm would blow rounding up; without dropout, which draws in memory order."""
    options = options | ({"dropout": 0} if name == "wrn28-10" else {})
    dtype = torch.double if REGISTRY[name].normed else torch.float
    fast, plain = make(name, options, shape).to(dtype), make(name, options, shape, fast=False).to(dtype)
    assert fast.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(fast.parameters(), plain.parameters(), strict=True))
    g = torch.Generator().manual_seed(1)
    fast.load_state_dict({k: v + 0.01 * torch.rand(v.shape, generator=g).to(v) for k, v in plain.state_dict().items()})
    plain.load_state_dict(fast.state_dict())
    x = torch.randn(20, *shape, generator=g, dtype=dtype)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    channels_last = inputs[0].contiguous(memory_format=torch.channels_last) if len(shape) == 3 else inputs[0]
    results = []
    for net, leaf, given in ((fast, inputs[0], channels_last), (plain, inputs[1], inputs[1])):
        logits = net(given)
        (logits.square().mean() * 10).backward()
        with torch.no_grad():
            grads = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
            results.append([logits, leaf.grad, grads, net.eval()(given)])
    for a, b in zip(*results, strict=True):
        assert a is not None
        assert b is not None
        assert float((a - b).detach().norm()) < 1e-4 * float(b.detach().norm())


@pytest.mark.parametrize(("name", "options", "shape"), CHEAP)
def test_the_initial_parameters_depend_on_the_seed_alone(name: str, options: Any, shape: Any) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = make(name, options, shape)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = make(name, options, shape), build(name, shape, 3, seed=8, **options)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.head.state_dict().popitem()[1], other.head.state_dict().popitem()[1])
    weights = [(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True) if a.ndim > 1]
    assert not any(torch.equal(a, b) for a, b in weights)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of a pass and keeps the shape that the last mean, the global average, is taken of."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.last: tuple[int, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        self.counts[name] += 1
        if name == "mean":
            self.last = tuple(args[0].shape[1:])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "options", "shape", "expected", "last"),
    [
        # ResNet: the stem, 2 or 3 convolutions a block with a ReLU each, one per changed shape; a sum a block
        ("resnet8", {}, CIFAR, {"convolution": 1 + 6 + 2, "relu": 1 + 6, "add": 3}, (256, 8, 8)),
        ("resnet18", {}, CIFAR, {"convolution": 1 + 16 + 3, "relu": 1 + 16, "add": 8}, (512, 4, 4)),
        ("resnet50", {}, CIFAR, {"convolution": 1 + 48 + 4, "relu": 1 + 48, "add": 16}, (2048, 4, 4)),
        ("resnet18", {"stem": "imagenet"}, SKIN, {"max_pool2d_with_indices": 1, "relu": 17}, (512, 7, 7)),
        # WRN-28: 12 blocks of 2, 3 shortcuts, stem; two ReLUs a block and the last; dropout does nothing in evaluation
        ("wrn28-10", {}, CIFAR, {"convolution": 1 + 24 + 3, "relu": 24 + 1, "add": 12}, (640, 8, 8)),
        # B0: 16 blocks, 15 of them widened, each with two 1x1 gates; 9 keep their shape and add their input
        (
            "efficientnet-b0",
            {},
            (3, 224, 224),
            {"convolution": 2 + 15 + 16 + 16 + 32, "silu": 2 + 15 + 16 + 16, "sigmoid": 16, "mul": 16, "add": 9},
            (1280, 7, 7),
        ),
    ],
)
def test_large_nets_have_the_operations_of_their_papers(
    name: str, options: Any, shape: Any, expected: dict[str, int], last: tuple[int, ...]
) -> None:
    with torch.device("meta"), torch.no_grad():
        net = build(name, shape, 10, seed=0, fast=False, **options).eval()
        with Operations() as seen:
            net(torch.empty(1, *shape))
    assert {key: seen.counts[key] for key in expected} == expected
    assert seen.last == last


@torch.no_grad()
def test_features_are_rectified_except_after_a_projection() -> None:
    x = torch.randn(50, *MNIST, generator=torch.Generator().manual_seed(0))
    for name in ("mlp", "cnn"):
        assert float(build(name, MNIST, 10, seed=0).body(x).min()) == 0
    assert float(build("simple-cnn", MNIST, 10, seed=0, projection=False).body(x).min()) == 0
    assert (build("simple-cnn", MNIST, 10, seed=0).body(x) < 0).float().mean() > 0.3


def test_resnet8_convolutions_are_initialised_normal_with_variance_2_over_fan_out() -> None:
    """A 3x3 convolution from 128 to 256 channels has fan-out 9 * 256: standard deviation sqrt(2 / 2304) = 0.02946."""
    convolutions = [layer for layer in build("resnet8", CIFAR, 10, seed=0).modules() if isinstance(layer, nn.Conv2d)]
    (widening,) = [c.weight.detach() for c in convolutions if c.weight.shape == (256, 128, 3, 3)]
    assert float(widening.std()) == pytest.approx(0.02946, rel=0.01)
    assert float(widening.abs().max()) > 4 * 0.02946


def test_resnet50_strides_on_its_3x3_convolutions() -> None:
    with torch.device("meta"):
        net = build("resnet50", CIFAR, 10, seed=0)
    strided = [layer for layer in net.modules() if isinstance(layer, nn.Conv2d) and layer.stride == (2, 2)]
    in_path = [layer.kernel_size for layer in strided if layer.in_channels == layer.out_channels]
    in_shortcut = [layer.kernel_size for layer in strided if layer.in_channels != layer.out_channels]
    assert in_path == [(3, 3)] * 3
    assert in_shortcut == [(1, 1)] * 3


def test_the_imagenet_stem_is_a_7x7_convolution_and_a_3x3_pool_both_of_stride_2() -> None:
    with torch.device("meta"):
        body = build("resnet18", CIFAR, 10, seed=0, stem="imagenet").body
    first, pool = body[0], body[3]  # type: ignore[index]
    assert (first.kernel_size, first.stride, first.padding) == ((7, 7), (2, 2), (3, 3))
    assert (pool.kernel_size, pool.stride, pool.padding) == (3, 2, 1)


def test_an_efficientnet_block_adds_its_input_only_if_it_keeps_the_shape() -> None:
    x = torch.randn(2, 8, 4, 4)
    for stride, residual in ((1, True), (2, False)):
        block = MBConv(8, 8, 1, 3, stride, Layers()).eval()
        added = x if residual else 0
        assert torch.equal(block(x), block.path(x) + added)


def test_squeeze_and_excite_scales_by_a_gate_of_the_channel_mean() -> None:
    """Weights 1, no bias, values 1 and 3: mean 2, silu(2) = 1.7616, sigmoid(1.7616) = 0.8534."""
    squeeze = Squeeze(1, 1)
    for layer in (squeeze.gate[0], squeeze.gate[2]):
        nn.init.ones_(layer.weight)  # type: ignore[arg-type]
        nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    gated = squeeze(torch.tensor([1.0, 3.0]).view(1, 1, 1, 2)).flatten().tolist()
    assert gated == pytest.approx([0.8534, 3 * 0.8534], abs=1e-4)


def test_other_nets_are_initialised_as_torch_does() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first = nn.Conv2d(1, 32, 5, padding=2)
    assert torch.equal(build("cnn", MNIST, 10, seed=3).body[0].weight, first.weight)  # type: ignore[index]


@pytest.mark.parametrize(("name", "options", "shape"), NORMED)
def test_norm_replaces_every_normalisation_layer(name: str, options: Any, shape: Any) -> None:
    def kinds(norm: Any) -> list[type]:
        net = make(name, options, shape, norm=norm)
        assert all(layer.num_groups == 2 for layer in net.modules() if isinstance(layer, nn.GroupNorm))
        assert net.eval()(torch.zeros(2, *shape)).shape == (2, 3)
        return [type(layer) for layer in net.modules() if isinstance(layer, nn.BatchNorm2d | nn.GroupNorm)]

    batch, group = kinds("batch"), kinds("group")
    assert len(batch) == len(group) > 0
    assert all(issubclass(kind, nn.BatchNorm2d) for kind in batch)
    assert set(group) == {nn.GroupNorm}
    assert kinds("none") == []
    assert kinds("default") == batch


def test_without_a_norm_convolutions_have_biases() -> None:
    for name in ("resnet8", "resnet18", "wrn28-10", "efficientnet-b0"):
        with torch.device("meta"):
            net = build(name, CIFAR, 10, seed=0, norm="none", **({"bias": False} if name == "wrn28-10" else {}))
        assert all(layer.bias is not None for layer in net.modules() if isinstance(layer, nn.Conv2d))


def test_cnn4_uses_the_batch_statistics_even_in_evaluation() -> None:
    net = make("cnn4", {}, (3, 16, 16)).eval()
    x = torch.randn(4, 3, 16, 16)
    assert not torch.allclose(net(x)[:1], net(x[:1]), atol=1e-4)
    tracking = make("cnn4", {"track": True}, (3, 16, 16)).eval()
    assert torch.allclose(tracking(x)[:1], tracking(x[:1]), atol=1e-4)


def test_wrn_has_the_dropout_and_momentum_of_fedmr() -> None:
    """Dropout .3 in each of its 12 blocks; the last norm's momentum is .9."""
    with torch.device("meta"):
        net = build("wrn28-10", CIFAR, 100, seed=0)
    assert [layer.p for layer in net.modules() if isinstance(layer, nn.Dropout)] == [0.3] * 12
    assert [layer.momentum for layer in net.modules() if isinstance(layer, nn.BatchNorm2d)] == [0.1] * 24 + [0.9]


def test_a_wrn_block_drops_values_between_its_convolutions_in_training_only() -> None:
    """The first convolution makes 1 everywhere; dropout .5 makes each 0 or 1 / .5 = 2."""
    block = Block(1, 1, 1, WrnOptions(dropout=0.5), Layers("none"))
    nn.init.zeros_(block.conv1.weight)
    nn.init.ones_(block.conv1.bias)
    seen: list[Tensor] = []
    block.conv2.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    block.train()(torch.zeros(1, 1, 16, 16))
    block.eval()(torch.zeros(1, 1, 16, 16))
    assert seen[0].unique().tolist() == [0.0, 2.0]
    assert seen[1].unique().tolist() == [1.0]


def test_convnet5_head_has_two_layers() -> None:
    head = make("convnet5", {"hidden": 16}, (1, 28, 28)).head
    assert [type(layer) for layer in head.children()] == [nn.Linear, nn.ReLU, nn.Linear]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (("resnet19", CIFAR, {}), "unknown net 'resnet19'; did you mean 'resnet18'?"),
        (("resnet18", CIFAR, {"projecton": True}), "did you mean 'projection'?"),
        (("resnet18", CIFAR, {"stem": "vgg"}), "expected one of cifar, imagenet"),
        (("resnet18", CIFAR, {"norm": "layer"}), "unknown norm 'layer'"),
        (
            ("cnn", MNIST, {"norm": "group"}),
            "norm=group is invalid: expected default or none, as cnn has no normalisation layers",
        ),
        (("simple-cnn", (3, 16, 15), {}), "simple-cnn is invalid for images of 16x15: expected at least 16x16"),
        (("cnn", (3, 3, 9), {}), "cnn is invalid for images of 3x9: expected at least 4x4"),
        (("cnn", (1, 15, 15), {"padding": False}), "cnn is invalid for images of 15x15: expected at least 16x16"),
        (("cnn4", (1, 15, 15), {}), "cnn4 is invalid for images of 15x15: expected at least 16x16"),
        (("convnet5", (1, 15, 15), {}), "convnet5 is invalid for images of 15x15: expected at least 16x16"),
        (("resnet18", (20,), {}), "shape (20,): expected images (channels, height, width); mlp takes any shape"),
        (("mlp", (), {}), "mlp is invalid for shape (): expected"),
        (("mlp", (4,), {"hidden": "20-x"}), "'20-x' is invalid: expected widths"),
        (("mlp", (4,), {"hidden": (20, 0)}), "widths (20, 0) are invalid: expected 1 or more"),
        (("cnn", MNIST, {"channels": ""}), "channels='' is invalid: expected one width or more"),
        (("wrn28-10", CIFAR, {"depth": 17}), "depth=17 is invalid: expected 6n + 4"),
        (("resnet8", CIFAR, {"width": 5}), "multiple of 2"),
    ],
)
def test_an_error_says_what_is_expected(call: Any, words: str) -> None:
    name, shape, options = call
    with pytest.raises(UsageError) as caught:
        build(name, shape, 10, seed=0, **options)
    assert words in str(caught.value)


def test_zero_classes_are_an_error() -> None:
    with pytest.raises(UsageError, match="classes=0 is invalid: expected at least one class"):
        build("mlp", (4,), 0, seed=0)


@pytest.mark.parametrize("name", ["cnn", "simple-cnn", "cnn4", "convnet5"])
def test_the_smallest_image_allowed_works(name: str) -> None:
    px = 4 if name == "cnn" else 16
    assert make(name, {}, (1, px, px))(torch.zeros(2, 1, px, px)).shape == (2, 3)


@pytest.mark.parametrize("given", [50, "50", (50,), [50]])
def test_widths_may_be_a_number_text_or_a_list(given: Any) -> None:
    assert build("mlp", (2, 3), 4, seed=0, hidden=given).features == 50


def test_no_hidden_layers_is_logistic_regression() -> None:
    net = build("mlp", (2, 3), 4, seed=0, hidden=())
    assert net.features == 6
    assert count(net.parameters()) == 28
    assert build("mlp", (2, 3), 4, seed=0, hidden="").features == 6
    x = torch.randn(5, 2, 3)
    assert torch.equal(net.body(x), x.flatten(1))


def test_the_listing_has_every_net_with_its_size() -> None:
    rows = {row["name"]: row for row in listing()}
    assert rows.keys() == REGISTRY.keys()
    assert rows["cnn"]["parameters"] == 1_663_370
    assert rows["resnet8"]["features"] == 256
    assert all({"for", "input", "features", "parameters"} <= row.keys() for row in rows.values())


class UserNet(nn.Module):
    """A user's own net, with its last layer inside a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 5)
        self.classifier = nn.Sequential(nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.stem(x.flatten(1)))
        return out


def test_wrap_splits_a_copy_of_a_user_s_net_at_the_named_layer() -> None:
    users = UserNet()
    before = copy.deepcopy(users.state_dict())
    net = wrap(users, "classifier.3")
    x = torch.randn(2, 2, 3)
    assert torch.equal(net(x), users(x))
    assert net.body(x).shape == (2, net.features) == (2, 4)
    assert set(net.state_dict()) == {
        *("body.stem.weight", "body.stem.bias", "body.classifier.1.weight", "body.classifier.1.bias"),
        *("head.weight", "head.bias"),
    }
    nn.init.ones_(next(net.head.parameters()))
    assert all(torch.equal(users.state_dict()[key], value) for key, value in before.items())


def test_wrap_takes_a_head_of_several_layers() -> None:
    users = UserNet()
    net = wrap(users, "classifier")
    x = torch.randn(2, 6)
    assert net.features == 5
    assert net.body(x).shape == (2, 5)
    assert torch.equal(net(x), users(x))


@pytest.mark.parametrize("head", ["fc", "classifier.9", "classifier.2", "", "stem.weight", "classifier."])
def test_wrap_with_a_wrong_name_lists_the_linear_layers(head: str) -> None:
    with pytest.raises(UsageError, match=r"Linear layers: stem, classifier\.1, classifier\.3"):
        wrap(UserNet(), head)
