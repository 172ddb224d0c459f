"""Tied parameters, which have several names: they are kept, sent and counted once, and stay tied in all copies."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import METHODS, prepared, same, slow_except
from torch import Tensor, nn
from torch.nn.functional import linear

import pflsim
from lightning_modules.contract.checks import inline, rounds, states
from lightning_modules.nets.adjust import Adjustments
from lightning_modules.nets.frozen import Frozen
from lightning_modules.nets.own import own_net
from pflsim.config.components import target_of
from pflsim.data.dataset import Dataset

SMALL = ("data=digits", "clients=3", "local_steps=2", "split.validation=0.2", "executor=inline")


class Tied(nn.Module):
    """Layers b and c have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 10)
        self._tie()

    def _tie(self) -> None:
        self.c.weight = self.b.weight

    def second(self, x: Tensor) -> Tensor:
        return self.c(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.second(self.b(self.a(x.flatten(1)).relu()).relu()).relu())


class OneName(Tied):
    """The same function without a second name."""

    def _tie(self) -> None:
        del self.c.weight

    def second(self, x: Tensor) -> Tensor:
        return linear(x, self.b.weight, self.c.bias)


class Across(nn.Module):
    """The head has the weight of a layer of the body."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.fc = nn.Linear(64, 10), nn.Linear(10, 10), nn.Linear(10, 10, bias=False)
        self.fc.weight = self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.b(self.a(x.flatten(1)).relu()).relu())


FAST = {"fedavg", "fedcp"}


CASES = [*((method, "init=same") for method in METHODS), ("fedavg", "init=per_client")]


@pytest.mark.parametrize(("method", "init"), slow_except([case for case in CASES if case[0] in FAST], CASES))
def test_equal_to_one_parameter_with_one_name(method: str, init: str) -> None:
    found = []
    for model in (Tied, OneName):
        made = prepared(*SMALL, init, f"method={method}", f"model={target_of(model)}")
        executor = inline(made)
        reports = rounds(executor, (1, 2), range(3))
        found.append((states(executor), [report.up_bytes for report in reports]))
    assert same(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    assert not any("c.weight" in name for name in found[0][0][0])


def test_floco_needs_a_head_of_its_own(refused: Callable[..., str]) -> None:
    assert "floco" in refused(*SMALL, "progress=none", "method=floco", f"model={target_of(Across)}")


def test_frozen_ones_stay_tied() -> None:
    net = own_net(Across, None, (1, 8, 8), 10)
    Adjustments(freeze=("head",))(net)
    copies = [net, deepcopy(net)]
    assert all(isinstance(one.body.b.weight, Frozen) and one.body.b.weight is one.head.weight for one in copies)
    original: Any = net.original()
    assert isinstance(original.b.weight, nn.Parameter) and original.b.weight is original.fc.weight
    assert len([*original.parameters()]) == len([*Across().parameters()])


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_checkpoint_and_export_have_the_first_name(method: str, tmp_path: Path) -> None:
    """And a run continues from its checkpoint, and its global model is loaded without any client."""
    given: Any = {"method": method, "model": Across, "overrides": [*SMALL, "progress=none", "checkpoint.every=1"]}
    run = pflsim.run(**given, rounds=1, run_dir=str(tmp_path / "run"))
    longer = pflsim.run(**given, rounds=2, run_dir=str(tmp_path / "longer"))
    assert pflsim.resume(run, rounds=2).per_client().equals(longer.per_client())
    size = 4 * (64 * 10 + 10 + 10 * 10 + 10)
    for client in (None, 1):
        loaded: Any = pflsim.load_model(run, client)
        net = loaded.client.net
        original: Any = net.original()
        assert net.body.b.weight is net.head.weight and original.fc.weight is original.b.weight
        nets = 1 + (method == "ditto")
        assert sum(value.nbytes for value in loaded.client.state_dict().values()) == nets * size
    assert {*run.per_client().up_bytes} == {size}
    files = [path.read_bytes() for path in run.folder.rglob("checkpoints/*/*.pt")]
    assert files and not any(b"net.head.weight" in file for file in files)


@pytest.mark.parametrize("names", [("b.weight",), ("fc.weight",), ("b.weight", "fc.weight")])
def test_pretrained_weights_by_one_name_or_both(names: tuple[str, ...], tmp_path: Path) -> None:
    net, state = own_net(Across, None, (1, 8, 8), 10), Across().state_dict()
    saved = {name: state[name] for name in state if name in names or name not in ("b.weight", "fc.weight")}
    torch.save(saved, tmp_path / "saved.pt")
    Adjustments(weights=str(tmp_path / "saved.pt"))(net)
    assert torch.equal(net.head.weight, state["b.weight"])


class NextToken(nn.Module):
    """A causal model of transformers, whose head is its token embedding."""

    def __init__(self, kind: str, num_classes: int):
        super().__init__()
        transformers, size = (
            pytest.importorskip("transformers"),
            {"vocab_size": num_classes, "tie_word_embeddings": True},
        )
        if kind == "gpt2":
            config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=16, **size)
            self.model = transformers.GPT2LMHeadModel(config)
        else:
            heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
            config = transformers.LlamaConfig(hidden_size=8, intermediate_size=16, **heads, **size)
            self.model = transformers.LlamaForCausalLM(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.model.lm_head(self.model.base_model(x).last_hidden_state[:, -1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_causal_models_of_transformers(kind: str, tmp_path: Path) -> None:
    """The head is sent once, and with adapters it is frozen, since the embedding is."""
    rng = np.random.default_rng(0)
    data = Dataset("text", rng.integers(0, 20, (60, 7)), rng.integers(0, 20, 60), 20, 40, vocabulary=20)
    model = NextToken(kind, 20)
    given: Any = {"method": "fedavg", "data": data, "model": model, "partition": "iid", "overrides": [*SMALL[1:]]}
    for lora in ({}, {"r": 2}):
        run = pflsim.run(**given, lora=lora, rounds=1, progress="none", run_dir=str(tmp_path / f"{len(lora)}"))
        client: Any = pflsim.load_model(run).client
        original: Any = client.net.original()
        embedding = original.model.get_input_embeddings().weight
        assert embedding is original.model.lm_head.weight and isinstance(embedding, nn.Parameter)
        state = client.state_dict()
        assert {*run.per_client().up_bytes} == {sum(value.nbytes for value in state.values())}
        if lora:
            assert all("lora_" in name for name in state)
        else:
            assert {*run.per_client().up_bytes} == {4 * model.model.num_parameters()}
