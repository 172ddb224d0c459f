"""Every method's hooks with tensors on a GPU that does not exist: operations raise where devices mix."""

from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from packaging.version import Version
from support import METHOD_PARAMS, prepared
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_modules import prototypes
from lightning_modules.base import ClientModule
from lightning_modules.hosts.client_host import ClientHost
from lightning_modules.hosts.server_host import ServerHost
from pflsim.data.federated import Examples
from pflsim.engine.execution import ReplyTask
from pflsim.errors import SettingsError
from pflsim.fusion.attentive import mix, squared_distances
from pflsim.fusion.blocks import COLUMNS, products_on
from pflsim.fusion.mixing_weights import mixing_gradient

GPU = torch.device("cuda:0")
needs_fake_gpu = pytest.mark.skipif(
    torch.version.cuda is None or Version(torch.__version__) < Version("2.11"),
    reason="no fake GPU",
)
READS_VALUES = {"fedala", "fedas", "fedcac", "fedpac", "fedphp", "fedselect", "ifca", "knn_per", "pfedfda", "pfedpm"}
READS_VALUES |= {"r_pfedpm"}
"""Methods whose hooks depend on values, which tensors without memory do not have."""


def on_gpu(examples: Examples) -> Examples:
    x, y = examples.x, examples.y
    return replace(
        examples, x=torch.empty(x.shape, dtype=x.dtype, device=GPU), y=torch.empty(y.shape, dtype=y.dtype, device=GPU)
    )


def moved(module: ClientModule) -> ClientModule:
    """Replace all tensors of a module; `module.to` cannot, since it assigns to their memory."""
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, value in tensors.items():
                if value is not None:
                    new = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)
                    tensors[name] = torch.nn.Parameter(new) if tensors is part._parameters else new
    return module


def gradients_of_zero(outputs: Any, inputs: Any, **_: Any) -> tuple[torch.Tensor, ...]:
    """In place of `torch.autograd.grad`, which needs a GPU that exists."""
    del outputs
    return tuple(torch.zeros_like(value) for value in ([inputs] if isinstance(inputs, torch.Tensor) else inputs))


@needs_fake_gpu
@pytest.mark.parametrize("method", METHOD_PARAMS)
def test_hooks_stay_on_their_device(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = prepared("clients=3", "lockstep=false", "model.hidden=[8]", f"method={method}")
    host = ClientHost(made.factory, made.dataset, made.partition, range(3))
    server = ServerHost(made.rule, made.federation, 1)
    if server.rule.initial_round:
        server.fuse([reply.uplink for reply in host.run(ReplyTask(), dict.fromkeys(range(3))).values()])
    message, own = server.downlinks([0])[0], host.shards[0]
    # the number of classes is given, but without values its shape counts as unknown
    for place in (torch, prototypes.torch):
        monkeypatch.setattr(place, "bincount", lambda labels, minlength: labels.new_zeros(minlength))
    # the backward pass needs a real device
    expected = (DataDependentOutputException, DynamicOutputShapeException) if method in READS_VALUES else ()
    expected = (*expected, SettingsError) if method == "knn_per" else expected  # it predicts in evaluations only
    monkeypatch.setattr(torch.autograd, "grad", gradients_of_zero)
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = moved(host.modules[0])
        module.round_number = 1  # not the initial round, in which a client may train
        shard = replace(own, train=on_gpu(own.train), val=on_gpu(own.val), test=on_gpu(own.test))
        module.receive(message.to(GPU, extra=not module.extra_on_cpu))
        with suppress(*expected):
            module.before_training(shard)
        batch = shard.train.batch(slice(8))
        with suppress(*expected):
            for phase in (phase for stage in module.stages() for phase in stage.phases):
                assert all(term.device == GPU for term in getattr(module, phase.objective)(batch).values())
        module.eval()
        with suppress(*expected):
            assert module.predict(batch[0]).device == GPU
            assert module.predict_global(batch[0]).device == GPU
        with suppress(*expected):
            uplink = module.reply(shard)
            assert all(value.device.type == "cpu" for value in (*uplink.weights.values(), *uplink.extra.values()))


@needs_fake_gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_products_on_the_server_device(device: str) -> None:
    """Blocks are uploaded, products are computed there, and results are where the rows are."""
    with FakeTensorMode(), products_on(torch.device(device)):
        rows = [torch.zeros(COLUMNS + 3) for _ in range(4)]
        weights = torch.ones(2, 4, dtype=torch.float64)
        with Devices() as seen:
            found = [squared_distances(rows), *mix(weights, rows), mixing_gradient(weights, rows, rows[:2])]
        assert all(value.device.type == "cpu" for value in found)
        assert [seen.of[name] for name in ("_pdist_forward", "mm", "addmm_")] == [{device}] * 3


class Devices(TorchDispatchMode):
    """Records the devices on which operations run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.of = defaultdict[str, set[str]](set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = next(value for value in (*args, torch.empty(0)) if isinstance(value, torch.Tensor))
        self.of[func.overloadpacket.__name__].add(first.device.type)
        return func(*args, **(kwargs or {}))
