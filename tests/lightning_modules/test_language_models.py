"""Training and evaluation of next-token prediction, against transformers and by hand."""

import math
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import inline, play, prepared, refusing
from torch.nn import functional

import pflsim
from lightning_modules.nets.char_lstm import CharLSTM
from lightning_modules.nets.text_transformer import TextTransformer
from lightning_modules.phases import Phase
from pflsim import cli
from pflsim.analysis.comparison import compare_sets
from pflsim.analysis.groups import check_evaluation, group_runs
from pflsim.analysis.runs import find_runs, read_run
from pflsim.data.sources.documents import Packer
from pflsim.records.evaluation import evaluation
from pflsim.tasks.language import IGNORED, token_metrics, token_sums
from pflsim.tasks.task import Criterion, Task
from pflsim.types import EvalRow

WORDS = ["task=language_model", "data=text", "data.tokens=characters", "data.path=docs", "data.length=12"]


@pytest.fixture(autouse=True)
def files(here: Path) -> None:
    for name, text in {"ann": "to be or not", "bob": "all the world", "eve": "the rest is silence, and more"}.items():
        (here / "docs" / name).mkdir(parents=True)
        for number in range(8):
            (here / "docs" / name / f"{number}.txt").write_text(f"{text} {number}")


@pytest.mark.parametrize("prompt", [0, 5])
def test_the_loss_is_that_of_transformers(prompt: int) -> None:
    """With padding, and with a prompt that is not predicted; and its gradients."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=8, n_layer=2, n_head=2, attn_pdrop=0.0)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    packer, drawn = Packer(12, end=10, padding=0), torch.randint(1, 10, (3, 9)).tolist()
    parts = [packer.answered(tokens[:prompt], tokens[prompt : 9 - row]) for row, tokens in enumerate(drawn)]
    x, y = (torch.from_numpy(np.concatenate(part)) for part in zip(*parts, strict=True))
    assert (y == IGNORED).any() and x.shape == (3, 12)
    labels = torch.cat((torch.full((3, 1), IGNORED), y), 1)  # transformers shifts them
    theirs = model(torch.cat((x, torch.zeros(3, 1, dtype=torch.int64)), 1), labels=labels).loss
    ours = Criterion(Task("language_model", 11))(model(x).logits, y)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
    wanted = torch.autograd.grad(theirs, [*model.parameters()])
    for found, expected in zip(torch.autograd.grad(ours, [*model.parameters()]), wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_nothing_to_predict_is_a_loss_of_0() -> None:
    logits, y = torch.randn(2, 3, 5, requires_grad=True), torch.full((2, 3), IGNORED)
    loss = Criterion(Task("language_model", 5))(logits, y)
    (gradient,) = torch.autograd.grad(loss, [logits])
    assert loss.item() == 0 and not gradient.any()
    assert token_metrics(*token_sums(logits, y).sum(0).tolist()) == {"tokens": 0.0}


def test_sums_over_tokens() -> None:
    logits = torch.log(torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], [[0.2, 0.6, 0.2], [math.nan, 0.5, 0.5]]]))
    sums = token_sums(logits, torch.tensor([[0, 1], [1, IGNORED]])).tolist()
    assert sums[0] == pytest.approx([1, math.log(2) + math.log(10), 2])
    assert sums[1] == pytest.approx([1, -math.log(0.6), 1])
    nll = (math.log(2) + math.log(10)) / 2
    wanted = {"nll": nll, "perplexity": math.exp(nll), "token_accuracy": 0.5, "tokens": 2.0}
    assert token_metrics(*sums[0]) == pytest.approx(wanted)
    assert (
        math.isnan(token_metrics(0, math.nan, 2)["perplexity"]) and token_metrics(0, 1e9, 2)["perplexity"] == math.inf
    )


def test_means_over_clients_and_over_all_tokens() -> None:
    """Means of the clients' perplexities, and the exponential of the pooled loss of a token."""
    parts = {0: (3, 4.0, 10), 1: (9, 36.0, 30), 2: (0, 0.0, 0)}
    rows = [
        EvalRow(c, "test", "global", "received", None, 2, loss, metrics=token_metrics(right, loss, n))
        for c, (right, loss, n) in parts.items()
    ]
    found = evaluation(rows)
    assert found is not None
    nll, perplexity = found.metrics["nll"], found.metrics["perplexity"]
    assert (nll.clients, nll.undefined) == (2, 1)
    assert (nll.mean, nll.weighted_mean, nll.pooled) == pytest.approx((0.8, 1.0, 1.0))
    assert perplexity.mean == pytest.approx((math.exp(0.4) + math.exp(1.2)) / 2)
    assert perplexity.weighted_mean == pytest.approx((10 * math.exp(0.4) + 30 * math.exp(1.2)) / 40)
    assert perplexity.pooled == pytest.approx(math.e)
    assert found.metrics["token_accuracy"].pooled == pytest.approx(12 / 40)


@pytest.mark.parametrize("make", [CharLSTM, lambda *a, **k: TextTransformer(*a, causal=True, **k)])
def test_a_prediction_depends_on_the_tokens_before_it(make: Any) -> None:
    torch.manual_seed(0)
    net = make((6,), 9, width=8, vocabulary=9).eval()
    x = torch.randint(9, (2, 6))
    changed = x.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 9
    first, second = net(x), net(changed)
    assert first.shape == (2, 6, 9) and net.feature_shape == (6, 8)
    assert torch.equal(first[:, :4], second[:, :4])
    assert not torch.isclose(first[:, 4:], second[:, 4:]).all(-1).any()


LSTM = ["model.width=8", "model.embedding=4"]
TRANSFORMER = ["model=text_transformer", "model.width=8"]
RUN = [*WORDS, "executor=inline", "progress=none", "batch_size=4", "lr=0.5"]


@pytest.mark.parametrize("model", [LSTM, TRANSFORMER])
def test_a_run(model: list[str]) -> None:
    """Records agree with the saved model on the packed documents; the loss falls."""
    words = ["method=fedavg", *model, *RUN, "rounds=3"]
    run, made = pflsim.run(overrides=words), prepared(*words)
    table = run.per_client().query("model == 'global' and split == 'test'")
    first, last = (table[table["round"] == number].set_index("client") for number in (1, 3))
    assert first.nll.mean() > last.nll.mean() == pytest.approx(run.mean())
    net = pflsim.load_model(run)
    for client, rows in enumerate(made.partition.test):
        x, y = made.dataset.x[rows], made.dataset.y[rows]
        p = functional.softmax(net(torch.from_numpy(x)).detach().double(), -1).numpy()
        each = -np.log(p[y != IGNORED, y[y != IGNORED]])
        assert last.nll[client] == pytest.approx(each.mean(), rel=1e-5)
        assert last.perplexity[client] == pytest.approx(math.exp(each.mean()), rel=1e-5)
        assert (last.tokens[client], last.total[client]) == (len(each), len(rows))


METHODS = ("local", "fedavg", "fedprox", "ditto", "fedper", "fedrep", "fedala", "apfl", "scaffold")
WITH_ADAPTERS = ("fedsa_lora", "ffa_lora", "hetlora method.ranks=[1,2]", "flexlora method.ranks=[1,2]", "feddpa_lora")


@pytest.mark.parametrize("method", [*METHODS, *(f"{name} lora.r=2" for name in WITH_ADAPTERS)])
def test_methods_train_alike_alone_and_in_stacks(method: str) -> None:
    words = [*f"method={method}".split(), *TRANSFORMER, *RUN, "rounds=2"]
    together, alone = (prepared(*words, *more) for more in ([], ["lockstep=false"]))
    assert together.factory.stacks and not alone.factory.stacks
    module = together.factory.build()
    assert not any("head" in name for name in module.shared_parameters()) or "lora" not in method, "the head is frozen"
    found = [pflsim.run(overrides=[*words, *more]).per_client() for more in ([], ["lockstep=false"])]
    assert np.allclose(found[0].nll.dropna(), found[1].nll.dropna(), rtol=1e-4) and found[0].nll.notna().sum() >= 6


def test_accumulated_batches_weigh_by_predicted_tokens() -> None:
    """Mini-batches with unlike numbers of predicted tokens, against one batch of all their rows."""
    x, y = torch.randint(5, (8, 12)), torch.randint(5, (8, 12))
    y[torch.arange(12) > torch.arange(8)[:, None]] = IGNORED
    y[6:] = IGNORED
    found = []
    for size in (8, 2):
        words = [f"batch_size={size}", f"accumulate_grad_batches={8 // size}", "lockstep=false"]
        module = prepared("method=local", *TRANSFORMER, *RUN, *words).factory.build().double()
        step = module.make_step(Phase())
        terms = module.compute_gradients((x, y), step.phase, step.parameters)
        found.append([*terms.values(), *(parameter.grad for parameter in step.parameters)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("lockstep", ["false", "auto"])
def test_weights_by_tokens(lockstep: str) -> None:
    """The global model is the mean of the clients' models by examples, or by their predicted tokens."""
    words = ["method=fedavg", *TRANSFORMER, *RUN, f"lockstep={lockstep}"]
    for by in ("examples", "tokens"):
        made = prepared(*words, f"task.weights_by={by}")
        executor = inline(made)
        sent = play(executor, 1, range(3))[1]
        y = [made.dataset.y[rows] for rows in made.partition.train]
        counted = {"examples": [len(own) for own in y], "tokens": [int((own != IGNORED).sum()) for own in y]}
        assert [sent[client].num_examples for client in range(3)] == counted[by] and counted["tokens"] != counted[
            "examples"
        ]
    with refusing(match=r"task\.weights_by"):
        prepared("method=fedavg", "data=digits", "task.weights_by=tokens")


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedsa_lora lora.r=2", "feddpa_lora lora.r=2 model.dtype=bf16"])
def test_causal_models_of_transformers(method: str, tied: bool, here: Path) -> None:
    """Their logits, also with more tokens than the data have; a tied embedding is sent once, and adapters alone."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=tied)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained("gpt2")
    words = [*f"method={method}".split(), "model=hf", "model.path=gpt2", *RUN, "rounds=2", "lr=0.05"]
    made = prepared(*words)
    module, x = made.factory.build().eval(), torch.from_numpy(made.dataset.x[:3])
    tolerance = 0.05 if "bf16" in method else 1e-5
    torch.testing.assert_close(module.net(x), theirs(x).logits, rtol=tolerance, atol=tolerance, check_dtype=False)
    sent = sum(module.get_parameter(name).numel() for name in module.shared_parameters())
    if "lora" not in method:
        assert sent == theirs.num_parameters()
    assert "lora" not in method or all("lora_" in name for name in module.shared_parameters())
    with refusing(match=r"lora\.head") if tied and "lora" in method else nullcontext():
        prepared(*words, *["lora.head=true"] * ("lora" in method)).factory.build()
    run = pflsim.run(overrides=words)
    nll = run.per_client().query("split == 'test' and model == @run.reported.model").groupby("round").nll.mean()
    assert nll[2] < nll[1] < math.log(60) + 0.5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # of PEFT
@pytest.mark.parametrize("method", ["fedavg", "ditto lora.r=2"])
def test_saved_models_generate_as_transformers(method: str, here: Path) -> None:
    transformers, peft = (pytest.importorskip(name) for name in ("transformers", "peft"))
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=60, n_positions=40, n_embd=8, n_layer=2, n_head=2, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained("gpt2")
    words = [*f"method={method}".split(), "model=hf", "model.path=gpt2", *RUN, "rounds=2", "lr=0.5"]
    loaded = pflsim.load_model(pflsim.run(overrides=words), None if method == "fedavg" else "bob")
    loaded.save_pretrained("out")
    kind, x = transformers.AutoModelForCausalLM, torch.randint(20, (2, 12))
    saved = kind.from_pretrained("out" if method == "fedavg" else "gpt2")
    saved = (saved if method == "fedavg" else peft.PeftModel.from_pretrained(saved, "out")).eval()
    torch.testing.assert_close(saved(x).logits, loaded(x), rtol=1e-5, atol=1e-5)
    tokens = loaded.encoder.ids(["to be"])[0]
    for _ in range(4):  # greedy
        tokens.append(int(saved(torch.tensor([tokens])).logits[0, -1, :20].argmax()))
    only = {"max_new_tokens": 4, "do_sample": False, "suppress_tokens": [*range(20, 60)]}
    assert loaded.generate("to be", **only) == loaded.encoder.text(tokens) != "to be"


def test_the_base_model_is_evaluated_untrained(here: Path) -> None:
    words = [*TRANSFORMER, *RUN]
    assert cli.main(["baselines", *words, "seed=0,1", "--into", "beside"]) == 0
    runs = [pflsim.run(overrides=[*words, "method=local", "rounds=1", f"seed={seed}"]) for seed in (0, 1)]
    beside = [read_run(folder) for folder in find_runs(["beside"])]
    made = prepared(*words, "method=local")
    x, y = (torch.from_numpy(part[made.partition.test[1]]) for part in (made.dataset.x, made.dataset.y))
    p = made.factory.build().eval().net(x).softmax(-1)
    nll = beside[0].per_client().query("client == 1 and split == 'test'").nll.item()
    assert nll == pytest.approx(-p.gather(2, y.clamp(0)[..., None]).log()[y != IGNORED].mean().item(), rel=1e-5)
    (found,) = compare_sets([*runs, *beside])
    assert [row.label for row in (*found.rows, *found.baselines)] == ["Local", "Base model"]
    assert cli.main(["baselines", *words, "--models", "pooled"]) == 2


def test_other_tokens_are_not_compared(here: Path) -> None:
    """The documents of the clients are the same, and a loss of a word is not one of a character."""
    words = [*TRANSFORMER, *RUN, "rounds=1"]
    runs = [
        pflsim.run(overrides=[*words, f"method={method}", f"data.tokens={tokens}"])
        for method, tokens in (("local", "characters"), ("fedavg", "characters"), ("fedavg", "words"))
    ]
    assert len({run.partition_hash for run in runs}) == 1
    assert not check_evaluation(group_runs(runs[:2])) and check_evaluation(group_runs(runs[1:]))


@pytest.mark.slow
def test_memory_of_many_tokens(here: Path) -> None:
    """A round and its evaluation with 50,000 tokens need less than 1 GB, in a process of its own."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50_000, "n_positions": 64, "n_embd": 8, "n_layer": 1, "n_head": 2}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained("gpt2")
    words = ["method=fedavg", "model=hf", "model.path=gpt2", *RUN, "data.length=64", "rounds=1", "local_steps=2"]
    Path("run.py").write_text(
        "import resource, sys, torch, transformers\n"
        "from ray_actors import run\n"
        "from pflsim.cli import main\n"
        "start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"assert main({words!r}) == 0\n"
        "assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start < 2**20\n"
    )
    for name, text in {"ann": "a" * 5000, "bob": "b" * 5000, "eve": "c" * 5000}.items():
        for number in range(8):
            (here / "docs" / name / f"{number}.txt").write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "run.py"], check=True, env=environment, timeout=500)
