"""Every network: shapes, sizes, names and fusion units, by every file in configs/model."""

import importlib
import subprocess
import sys
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support import slow_except
from torch import nn
from torch.nn import functional as F

from lightning_modules.nets.cnn import Cnn
from lightning_modules.nets.mlp import Mlp
from lightning_modules.nets.net import Net, choose_memory_format
from pflsim.config.components import check_component
from pflsim.errors import SettingsError
from pflsim.params import UnitKind, resolve_threshold, units

FILES = sorted((Path(__file__).parents[2] / "configs" / "model").glob("*.yaml"))
FILES = [file for file in FILES if file.stem not in ("text_transformer", "char_lstm", "hf")]  # have tests of their own
DIGITS, MNIST, CIFAR = (1, 8, 8), (1, 28, 28), (3, 32, 32)
PFEDPM = ("pfedpm_cnn", "pfedpm_cnn_mh", "pfedpm_cnn_narrow")
TOO_SMALL = {(m, DIGITS) for m in ("cnn", "cnn_bn", *PFEDPM, "alexnet", "lenet", "lenet_bn")}
CASES = [(f.stem, shape) for f in FILES for shape in (DIGITS, MNIST, CIFAR) if (f.stem, shape) not in TOO_SMALL]


def make(model: str, shape: tuple[int, ...], classes: int = 10, **settings: Any) -> Net:
    """Build what a YAML file says, without the rest of the simulator."""
    node = check_component(yaml.safe_load((FILES[0].parent / f"{model}.yaml").read_text()) | settings, "model")
    module, _, name = node.pop("_target_").rpartition(".")
    node |= next(iter(node.pop("variants", [])), {})  # the first of several
    return getattr(importlib.import_module(module), name)(shape, classes, **node)


def seeded(make_net: Any, seed: int = 0) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make_net()


def count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def names(net: nn.Module, by: UnitKind) -> list[str]:
    parameters = [name for name, _ in net.named_parameters()]
    buffers = [name for name, b in net.named_buffers() if b.is_floating_point()]
    return [unit.name for unit in units(net, parameters, buffers, by)]


@pytest.mark.parametrize(
    ("model", "shape"), slow_except([case for case in CASES if "resnet" not in case[0] or case[1] == MNIST], CASES)
)
def test_shapes_and_composition(model: str, shape: tuple[int, ...]) -> None:
    net = seeded(partial(make, model, shape, 7)).eval()
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features = net.body(x)
        logits = net(x)
    assert features.shape == (2, *net.feature_shape)
    assert logits.shape == (2, 7)
    assert torch.equal(net.head(features), logits)


@pytest.mark.parametrize(("model", "shape"), sorted(TOO_SMALL))
def test_too_small_images(model: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(SettingsError, match="8x8.*take larger images.*model=mlp"):
        make(model, shape)


@pytest.mark.parametrize("model", [f.stem for f in FILES])
def test_flat_inputs(model: str) -> None:
    if isinstance(make(model, MNIST), Mlp):
        assert make(model, (30,))(torch.zeros(4, 30)).shape == (4, 10)
    else:
        with pytest.raises(SettingsError, match=r"needs images .* \[30\].*model=mlp"):
            make(model, (30,))


@pytest.mark.parametrize("model", [f.stem for f in FILES])
@pytest.mark.slow
def test_no_draw_after_the_weights(model: str) -> None:
    net = make(model, MNIST)
    before = torch.get_rng_state()
    net(torch.zeros(2, *MNIST))
    assert net.feature_shape
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        ("mlp", MNIST, 784 * 100 + 100 + 100 * 10 + 10),
        ("mnist_nn", MNIST, 784 * 50 + 50 + 50 * 10 + 10),
        ("cnn", MNIST, 582_026),
        ("cnn", CIFAR, (75 * 32 + 32) + (800 * 64 + 64) + (64 * 25 * 512 + 512) + 5_130),
        ("cnn_bn", MNIST, 582_026 + 2 * (32 + 64)),
        ("lenet", MNIST, (25 * 16 + 16) + (400 * 32 + 32) + (512 * 120 + 120) + (120 * 84 + 84) + 850),
        ("lenet_bn", CIFAR, (75 * 16 + 16) + (400 * 32 + 32) + 2 * 48 + (800 * 120 + 120) + (120 * 84 + 84) + 850),
        ("mnist_cnn", MNIST, (9 * 32 + 32) + (288 * 64 + 64) + (576 * 64 + 64) + (64 * 9 * 128 + 128) + 1_290),
        ("cifar10_cnn", CIFAR, (27 * 32 + 32) + (288 * 64 + 64) + (576 * 128 + 128) + (128 * 16 * 256 + 256) + 2_570),
        ("alexnet", CIFAR, 1_792 + 110_784 + 663_936 + 884_992 + 590_080 + 2 * 1_049_600 + 10_250),
        ("pfedpm_cnn", MNIST, (25 * 20 + 20) + (500 * 20 + 20) + (320 * 50 + 50) + 510),
        ("resnet18", CIFAR, 11_173_962),
    ],
)
def test_parameter_counts(model: str, shape: tuple[int, ...], expected: int) -> None:
    assert count(make(model, shape)) == expected


@pytest.mark.parametrize(
    ("model", "shape", "modules", "threshold"),
    [
        ("dnn", MNIST, ["body.fc1", "head"], 1),
        ("cnn", CIFAR, ["body.conv1", "body.conv2", "body.fc", "head"], 3),
        ("cnn_bn", CIFAR, ["body.conv1", "body.norm1", "body.conv2", "body.norm2", "body.fc", "head"], 5),
        ("lenet", CIFAR, ["body.conv1", "body.conv2", "body.fc1", "body.fc2", "head"], 4),
        ("mnist_cnn", MNIST, ["body.conv1", "body.conv2", "body.conv3", "body.fc", "head"], 4),
        ("alexnet", CIFAR, [*(f"body.conv{i}" for i in range(1, 6)), "body.fc1", "body.fc2", "head"], 7),
        ("pfedpm_cnn", MNIST, ["body.conv1", "body.conv2", "head.fc1", "head.fc2"], 2),
        ("pfedpm_cnn_narrow", MNIST, ["body.conv1", "body.conv2", "body.fc1", "head"], 3),
    ],
)
def test_units_in_the_order_of_the_forward_pass(
    model: str, shape: tuple[int, ...], modules: list[str], threshold: int
) -> None:
    net = make(model, shape)
    assert names(net, "module") == modules
    assert names(net, "tensor") == [f"{m}.{p}" for m in modules for p in ("weight", "bias")]
    client = torch.nn.ModuleDict({"net": net})
    layout = units(client, [name for name, _ in client.named_parameters()], [], "module")
    assert resolve_threshold("body", layout) == threshold


def test_resnet18_computes_what_torchvisions_does() -> None:
    from torchvision.models import resnet18

    net = make("resnet18", CIFAR).double()
    theirs = resnet18(num_classes=10).double()
    theirs.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False).double()
    theirs.maxpool = nn.Identity()  # type: ignore[assignment]
    theirs.load_state_dict({k.removeprefix("body.").replace("head.", "fc."): v for k, v in net.state_dict().items()})
    x = torch.rand(2, *CIFAR, dtype=torch.float64)
    torch.testing.assert_close(net(x), theirs(x), rtol=1e-12, atol=1e-12)


def test_cnn_computes_what_it_says() -> None:
    net = Cnn(DIGITS, 3, channels=[4, 6], kernel=3, padding=1, hidden=5).double()
    p = dict(net.named_parameters())
    x = torch.rand(2, *DIGITS, dtype=torch.float64)
    maps = x
    for conv in ("body.conv1", "body.conv2"):
        maps = F.conv2d(maps, p[f"{conv}.weight"], p[f"{conv}.bias"], padding=1)
        maps = maps.clamp(min=0).unfold(2, 2, 2).unfold(3, 2, 2).amax((4, 5))
    features = F.linear(maps.flatten(1), p["body.fc.weight"], p["body.fc.bias"]).clamp(min=0)
    torch.testing.assert_close(net(x), F.linear(features, p["head.weight"], p["head.bias"]))


# Memory formats ------------------------------------------------------------------------------------------------------

WIDTHS = (2, 3, 4, 6, 8, 12, 16, 64)
CONVOLUTIONAL = [
    *(("resnet18", MNIST if w > 8 else (1, 12, 12), {"width": w}) for w in WIDTHS),
    *(("resnet18_mh", (3, 12, 12), {"width": w}) for w in WIDTHS),
    *((name, MNIST, {"channels": [w, w]}) for name in ("cnn", "cnn_bn", "lenet", "lenet_bn") for w in WIDTHS),
    *((name, CIFAR, {"channels": [w] * 3}) for name in ("mnist_cnn", "cifar10_cnn") for w in WIDTHS),
    *((name, MNIST, {"hidden_channels": w}) for name in ("pfedpm_cnn", "pfedpm_cnn_narrow") for w in WIDTHS),
    *(("pfedpm_cnn", CIFAR, {"hidden_channels": w, "kernel": 1, "strides": [2, 2]}) for w in WIDTHS),
    ("alexnet", CIFAR, {"hidden": 8}),
]


def gradient_errors() -> None:
    """Compare gradients in the chosen memory format with float64 in contiguous memory; for a process of its own."""
    torch.set_num_threads(1)
    for model, shape, settings in CONVOLUTIONAL:
        print(model, shape, settings, flush=True)
        net = seeded(partial(make, model, shape, 4, **settings))
        for part in [*net.modules()]:
            for name, layer in part.named_children():
                if isinstance(layer, nn.ReLU):  # where rounding decides, gradients jump
                    setattr(part, name, nn.Softplus())
                if isinstance(layer, nn.MaxPool2d):
                    setattr(part, name, nn.AvgPool2d(2))
        exact = deepcopy(net).double()
        choose_memory_format(net)
        generator = torch.Generator().manual_seed(1)
        for _ in range(2):
            x = torch.rand(10, *shape, generator=generator)
            gradients = []
            for one, inputs in ((net, x.clone()), (exact, x.double())):
                one.zero_grad()
                F.cross_entropy(one(inputs.requires_grad_()), torch.arange(10) % 4).backward()
                gradients.append([inputs.grad, *(parameter.grad for parameter in one.parameters())])
            for got, expected in zip(*gradients, strict=True):
                assert (got - expected).norm() <= 1e-3 * expected.norm() + 1e-5


@pytest.mark.slow
def test_gradients_in_the_chosen_memory_format() -> None:
    """In a process of its own: oneDNN can overwrite memory, which ends it."""
    code = f"import sys; sys.path[:0] = {sys.path!r}; import test_nets; test_nets.gradient_errors()"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stdout[-100:], done.stderr[-2000:])


@pytest.mark.parametrize(
    ("layer", "last"),
    [
        (partial(nn.Conv2d, 4, 8, 1, 2), False),
        (partial(nn.Conv2d, 15, 8, 1, (1, 3)), False),
        (partial(nn.Conv2d, 30, 8, 1, 2, groups=2), False),
        (partial(nn.Conv2d, 16, 8, 1, 2), True),
        (partial(nn.Conv2d, 4, 8, 1, 1), True),
        (partial(nn.Conv2d, 4, 8, (1, 2), 2), True),
    ],
)
def test_convolutions_that_stay_contiguous(layer: Any, last: bool) -> None:
    net = Net(nn.Sequential(nn.Conv2d(3, 5, 3), layer()), nn.Linear(8, 2), (8,), 2)
    choose_memory_format(net)
    assert net.get_parameter("body.0.weight").is_contiguous(memory_format=torch.channels_last) == last
