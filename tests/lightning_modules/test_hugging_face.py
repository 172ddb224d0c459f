"""Models of Hugging Face and PEFT with random weights, and adapters by PEFT."""

import gc
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import check_loaded, prepared, same, shard
from torch import nn

import pflsim
from lightning_modules.contract.checks import inline, rounds
from lightning_modules.nets.adjust import Adjustments
from lightning_modules.nets.frozen import Frozen, frozen
from lightning_modules.nets.hugging_face import load
from lightning_modules.nets.own import own_net
from pflsim.cli import main
from pflsim.data.dataset import Dataset
from pflsim.data.federate import load_federation
from pflsim.records.saved_settings import saved_settings

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")]
SMALL = ["clients=2", "rounds=2", "local_steps=2", "partition=iid", "executor=inline", "progress=none"]


def text() -> Dataset:
    """Sequences whose first token is the class."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(4, 50, (60, 7)), rng.integers(0, 3, 60)
    x[:, 0] = 1 + y
    return Dataset("text", x.astype(np.int64), y.astype(np.int64), 3, 40, vocabulary=50)


def vit(width: int = 8) -> nn.Module:
    small: Any = {"image_size": 8, "patch_size": 4, "num_channels": 1, "intermediate_size": 16, "hidden_size": width}
    config = transformers.ViTConfig(num_hidden_layers=1, num_attention_heads=2, num_labels=10, **small)
    return transformers.ViTForImageClassification(config)


def distilbert() -> nn.Module:
    small: Any = {"vocab_size": 50, "dim": 8, "hidden_dim": 16, "max_position_embeddings": 16}
    small |= {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
    return transformers.DistilBertForSequenceClassification(
        transformers.DistilBertConfig(n_layers=1, n_heads=2, num_labels=3, **small)
    )


def llama(padding: int | None = 0) -> nn.Module:
    small: Any = {"vocab_size": 50, "hidden_size": 8, "intermediate_size": 16, "pad_token_id": padding}
    config = transformers.LlamaConfig(
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, num_labels=3, **small
    )
    return transformers.LlamaForSequenceClassification(config)


def gpt2() -> nn.Module:
    small: Any = {"vocab_size": 50, "n_embd": 8, "n_positions": 16, "n_layer": 1, "n_head": 2, "pad_token_id": 0}
    small |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2ForSequenceClassification(transformers.GPT2Config(num_labels=3, **small))


def adapted() -> nn.Module:
    config = peft.LoraConfig(r=2, target_modules=["q_lin", "v_lin"], task_type="SEQ_CLS")
    return peft.get_peft_model(distilbert(), config)


def by_ours(targets: str) -> dict[str, Any]:
    return {"lora": {"r": 2, "targets": [f"q_{targets}", f"v_{targets}"]}}


class Logits(nn.Module):
    """A module of a user with a transformers model as a part."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).logits


ADAPTERS = 2 * 4 * 2 * 8
"""Bytes of one layer's adapter: A and B of rank 2 and width 8, float32."""


@pytest.mark.parametrize(
    ("model", "data", "lora", "head"),
    [
        (vit, "digits", by_ours("proj"), 8 * 10 + 10),
        (distilbert, text(), by_ours("lin"), 8 * 3 + 3 + 8 * 8 + 8),
        (llama, text(), by_ours("proj"), 8 * 3),
        (adapted, text(), {}, 8 * 3 + 3 + 8 * 8 + 8),
    ],
    ids=["vit", "distilbert", "llama", "peft"],
)
def test_only_adapters_and_head_travel(
    model: Callable[[], nn.Module], data: Any, lora: dict[str, Any], head: int, tmp_path: Path
) -> None:
    """In lockstep and one by one alike; the model is given as a factory or an object."""
    torch.manual_seed(1)
    built, ends = model(), []
    for lockstep in (True, False):
        run = pflsim.run(
            model=built, data=data, method="fedavg", lockstep=lockstep, overrides=SMALL,
            run_dir=str(tmp_path / str(lockstep)), **lora,
        )  # fmt: skip
        assert {*run.per_client().up_bytes} == {2 * ADAPTERS + 4 * head}
        loaded = pflsim.load_model(run).client
        assert not any(torch.equal(p, torch.zeros_like(p)) for name, p in loaded.named_parameters() if "lora_B" in name)
        ends.append(loaded.state_dict())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-4)
    own = dict(built.state_dict())
    original = loaded.net.original().state_dict()
    for name in [name for name in own if "query" in name or "q_proj.weight" in name or "q_lin.weight" in name]:
        assert torch.equal(own[name], original[name.replace(".weight", ".base_layer.weight")])
    rows, partition = (data, None) if isinstance(data, Dataset) else load_federation(saved_settings(run.folder))
    if partition is not None:
        check_loaded(run, 0, tests=[shard(rows, partition, client).test for client in range(2)])


def test_a_factory_and_a_folder(tmp_path: Path, refused: Callable[..., str]) -> None:
    torch.manual_seed(1)
    vit().save_pretrained(tmp_path / "vit")
    named = ["model=hf", f"model.path={tmp_path / 'vit'}", "freeze=[body]", f"run_dir={tmp_path / 'run'}"]
    assert main([*SMALL, "method=fedavg", "data=digits", *named]) == 0
    loaded = pflsim.load_model(tmp_path / "run", trusted=True).client
    torch.manual_seed(1)
    expected = vit().state_dict()
    assert {*loaded.state_dict()} == {"net.head.weight", "net.head.bias"} and len(frozen(loaded)) == len(expected) - 2
    assert torch.equal(loaded.net.original().vit.layernorm.weight, expected["vit.layernorm.weight"])
    assert "none" in refused(*SMALL, "data=digits", "model=hf", f"model.path={tmp_path / 'none'}")


def roberta(kind: str = "RobertaForSequenceClassification") -> nn.Module:
    small: Any = {"vocab_size": 50, "hidden_size": 8, "intermediate_size": 16, "max_position_embeddings": 20}
    config = transformers.RobertaConfig(num_hidden_layers=1, num_attention_heads=2, num_labels=3, **small)
    return getattr(transformers, kind)(config)


@pytest.mark.parametrize(
    ("saved", "model", "drawn"),
    [
        ("RobertaModel", "folder", ["classifier.dense"]),
        ("RobertaForSequenceClassification", "folder", []),
        ("RobertaForSequenceClassification", "object", ["classifier.dense"]),
        ("RobertaForSequenceClassification", "part", ["classifier.dense"]),
    ],
)
@pytest.mark.parametrize("targets", [{}, {"targets": ["query", "dense"]}], ids=["all", "some"])
def test_layers_that_are_not_pretrained_are_trained_with_adapters(
    saved: str, model: str, drawn: list[str], targets: dict[str, Any], tmp_path: Path
) -> None:
    """Besides the head; in a model given as an object, all outside of its base model count as such."""
    roberta(saved).save_pretrained(tmp_path)
    makes = {
        "folder": partial(load, path=str(tmp_path)), "object": roberta, "part": lambda: Logits(roberta()),
    }  # fmt: skip
    net = own_net(makes[model], None, (7,), 3, vocabulary=50)
    Adjustments(lora={"r": 2, **targets})(net)
    trained = {net.name_of(name).rpartition(".")[0] for name in net.state_dict() if "lora_" not in name}
    assert {name.removeprefix("model.") for name in trained} == {*drawn, "classifier.out_proj"}
    adapted = {name.rpartition(".lora_A")[0] for name in net.state_dict() if "lora_A" in name}
    assert adapted and not any(name.endswith(tuple(drawn)) for name in adapted if drawn)


def normed() -> nn.Module:
    parts = {"flat": nn.Flatten(), "a": nn.Linear(64, 6), "norm": nn.BatchNorm1d(6), "fc": nn.Linear(6, 10)}
    return nn.Sequential(OrderedDict(parts))


BASE, TWO = partial(roberta, "RobertaModel"), {"r": 2}


@pytest.mark.parametrize(
    ("make", "folder", "method", "lora", "adapters"),
    [
        (BASE, True, "ditto", TWO, True),
        (BASE, True, "ffa_lora", {"targets": ["query", "value"], "use_dora": True}, True),
        (distilbert, True, "fedavg", TWO, True),
        (distilbert, True, "fedavg", {"targets": ["pre_classifier"]}, False),
        (distilbert, False, "fedavg", {}, False),
        (adapted, False, "fedavg", {}, True),
        (vit, False, "fedavg", {"bias": "lora_only"}, True),
        (normed, False, "fedsa_lora", TWO, True),
        (gpt2, True, "fedavg", TWO, True),
        (gpt2, False, "ffa_lora", {"r": 2, "use_dora": True}, True),
        (vit, False, "hetlora", {"r": 16}, True),
    ],
)
def test_a_saved_model_predicts_as_the_run(
    make: Callable[[], nn.Module], folder: bool, method: str, lora: dict[str, Any], adapters: bool, tmp_path: Path
) -> None:
    """Adapters fit the model that the run started from, whose new layers are drawn anew.

    PEFT takes "pre_classifier" of DistilBERT for its head too, so its adapter becomes a part of it.
    """
    torch.manual_seed(1)
    built: Any = make()
    texts, kind = make not in (vit, normed), transformers.AutoModelForSequenceClassification
    if folder:
        built.save_pretrained(tmp_path / "base")
    run = pflsim.run(
        model={"name": "hf", "path": str(tmp_path / "base")} if folder else built,
        data=text() if texts else "digits", method=method, lora=lora, overrides=[*SMALL, "lr=0.1"],
        run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    loaded = pflsim.load_model(run, 1)
    x = torch.from_numpy(text().x[:9]) if texts else torch.rand(9, 1, 8, 8)
    with torch.inference_mode():
        scores = loaded(x)
    loaded.save_pretrained(tmp_path / "out")
    base = kind.from_pretrained(tmp_path / "base", num_labels=3) if folder else deepcopy(built)
    if make is adapted:
        base = base.unload()
    assert adapters == (tmp_path / "out" / "adapter_config.json").exists()
    read = partial(peft.PeftModel.from_pretrained, base) if adapters else kind.from_pretrained
    saved = read(tmp_path / "out")
    with torch.inference_mode():
        found = saved.eval()(x)
        torch.testing.assert_close(getattr(found, "logits", found), scores, rtol=1e-6, atol=1e-6)
        assert torch.equal(loaded(x), scores)


@pytest.mark.parametrize("lora", ["{r: 2, targets: [none]}", "{rank: 2}", "{r: 0}"])
def test_wrong_adapters(lora: str, refused: Callable[..., str]) -> None:
    assert "lora" in refused(*SMALL, "data=digits", "model=mlp", f"lora={lora}")


def test_a_mapping_of_inputs(tmp_path: Path) -> None:
    """What the attention mask leaves out has no effect, in training and in a loaded model."""
    data, ends, others = text(), [], [text for text in SMALL if "partition" not in text]
    rows = {"train": [[*range(20)], [*range(20, 40)]], "test": [[*range(10)], [*range(10, 20)]]}
    for last in (0, 7):
        x = np.stack([data.x, np.ones_like(data.x)], axis=1)
        x[:, 0, -2:], x[:, 1, -2:] = last, 0
        given = Dataset("text", x, data.y, 3, 40, vocabulary=50, fields=("input_ids", "attention_mask"))
        torch.manual_seed(1)
        run = pflsim.run(
            method="fedavg", data=given, model=distilbert(), partition=rows, overrides=others,
            run_dir=str(tmp_path / f"{last}"),
        )  # fmt: skip
        loaded = pflsim.load_model(run)
        stacked = torch.from_numpy(x[:5])
        scores = loaded({"input_ids": stacked[:, 0], "attention_mask": stacked[:, 1]})
        assert torch.equal(scores, loaded(stacked))
        ends.append(scores)
    torch.testing.assert_close(ends[0], ends[1])


class Mixed(nn.Module):
    """With both kinds of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.more, self.fc = gpt2(), nn.Linear(8, 6), nn.Linear(6, 3)
        self.model.drawn = set()  # all layers are pretrained

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.more(self.model.transformer(x).last_hidden_state[:, -1]))


@pytest.mark.parametrize("make", [gpt2, Mixed])
def test_conv1d_of_transformers_is_adapted_as_peft_adapts_it(make: Callable[[], nn.Module]) -> None:
    """Without PEFT's warnings; y = x·(W + α/r·(BA)ᵀ) + b."""
    torch.manual_seed(1)
    net = own_net(make, None, (7,), 3, vocabulary=50)
    Adjustments(lora={"r": 2, "lora_alpha": 6})(net)
    kinds = {name.partition(".lora_A")[0].rpartition(".")[2] for name in net.state_dict() if ".lora_A" in name}
    assert kinds >= {"c_attn", "c_proj", "c_fc"} and ("more" in kinds) == (make is Mixed)
    layer: Any = net.get_submodule(next(name for name, _ in net.named_modules() if name.endswith("c_attn")))
    a, b, x = layer.lora_A["default"].weight, layer.lora_B["default"].weight, torch.randn(4, 8)
    nn.init.normal_(b)
    expected = x @ (layer.base_layer.weight + 3 * (b @ a).T) + layer.base_layer.bias
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize(("make", "low"), [(gpt2, False), (vit, True)])
def test_frozen_weights_in_bf16(make: Callable[[], nn.Module], low: bool, tmp_path: Path) -> None:
    """From a file in float32 or bfloat16; what is trained is float32, and PEFT predicts nearly the same in float32."""
    torch.manual_seed(1)
    made: Any = make()
    (made.bfloat16() if low else made).save_pretrained(tmp_path / "base")
    model = {"name": "hf", "path": str(tmp_path / "base"), "dtype": "bf16"}
    given: Any = {"data": "digits" if make is vit else text(), "method": "fedavg", "model": model, "lora": {"r": 2}}
    given["overrides"] = [*SMALL, "lr=0.1", "checkpoint.every=1"]
    run = pflsim.run(**given, run_dir=str(tmp_path / "run"))
    half = pflsim.run(**given, rounds=1, run_dir=str(tmp_path / "half"))
    assert pflsim.resume(half, rounds=2).per_client().equals(run.per_client())
    loaded, again = (pflsim.load_model(each, round="last") for each in (run, half))
    assert same({0: loaded.client.state_dict()}, {0: again.client.state_dict()})
    constants, head = (
        frozen(loaded.client).values(),
        [*made.get_submodule("score" if make is gpt2 else "classifier").parameters()],
    )
    assert sum(value.nbytes for value in constants) == 2 * (
        made.num_parameters() - sum(value.numel() for value in head)
    )
    assert {value.dtype for value in loaded.client.state_dict().values()} == {torch.float32}
    x = torch.rand(9, 1, 8, 8) if make is vit else torch.from_numpy(text().x[:9])
    loaded.save_pretrained(tmp_path / "out")
    base = type(made).from_pretrained(tmp_path / "base", dtype=torch.float32)
    with torch.inference_mode():
        scores = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()(x).logits
        assert loaded.client.net.body(x).dtype == loaded(x).dtype == torch.float32 and not torch.equal(
            loaded(x), scores
        )
        torch.testing.assert_close(loaded(x), scores, rtol=0.02, atol=0.02)


def test_layers_that_are_trained_beside_bf16_compute_in_float32(tmp_path: Path) -> None:
    BASE().save_pretrained(tmp_path)
    net: Any = own_net(partial(load, path=str(tmp_path), dtype="bf16"), None, (7,), 3, vocabulary=50)
    Adjustments(lora={"r": 2})(net)
    dense, seen = net.body.module.classifier.dense, list[torch.dtype]()
    dense.register_forward_hook(lambda part, inputs, output: seen.append(output.dtype))
    assert net(torch.ones(2, 7, dtype=torch.int64)).dtype == torch.float32
    assert seen == [dense.weight.dtype] == [torch.float32]


def test_bf16_needs_frozen_weights(tmp_path: Path, refused: Callable[..., str]) -> None:
    vit().save_pretrained(tmp_path)
    assert "model.dtype" in refused(*SMALL, "data=digits", "model=hf", f"model.path={tmp_path}", "model.dtype=bf16")
    assert "model.dtype" in refused(*SMALL, "data=digits", "model=hf", f"model.path={tmp_path}", "model.dtype=bf61")


@pytest.mark.parametrize(("method", "dtype"), [("fedavg", "float32"), ("ditto", "bf16")])
def test_a_frozen_backbone_serves_all_clients(method: str, dtype: str, tmp_path: Path) -> None:
    """Ninety more clients cost ninety times what they train, in their states, their uplinks and the server's."""
    torch.manual_seed(1)
    vit(width=64).save_pretrained(tmp_path)

    def memory() -> int:
        gc.collect()
        tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter, Frozen)]
        plain = [one for one in tensors if not torch._C._functorch.is_functorch_wrapped_tensor(one)]
        floats = [one.untyped_storage() for one in plain if one.is_floating_point()]
        return sum({storage.data_ptr(): storage.nbytes() for storage in floats}.values())

    def cost(clients: int) -> tuple[int, int, int]:
        before = memory()
        model = ["model=hf", f"model.path={tmp_path}", f"model.dtype={dtype}", "lora={r: 1}", f"method={method}"]
        made = prepared("data=digits", "partition=iid", f"clients={clients}", "local_steps=1", *model)
        executor = inline(made)
        rounds(executor, (1, 2), range(clients))
        own = sum(value.nbytes for value in executor.host.states[0].values())
        return memory() - before, own, sum(value.nbytes for value in frozen(executor.host.module).values())

    (few, _, _), (many, own, backbone) = cost(10), cost(100)
    assert many - few < 90 * 2 * own < 90 * backbone
