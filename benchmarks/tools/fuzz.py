"""Runs random configurations and prints those that end otherwise than with one line that names a setting.

    python -m benchmarks.tools.fuzz --count 1500 --seed 0

Methods, all models of `configs/model` at small widths, data, partitions, optimisers, precisions and faults are drawn
together, with values that users try. A run ends with status 0, or with status 2 and a line that names a key of the
command, or because values are not finite. All others are printed. Each run has a process of its own, so that a signal
or a hang is printed too.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import multiprocessing
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import yaml

from pflsim.config.compose import CONFIGS, as_yaml, composed, config_folders, parse

SCHOOLS = "table data.path={folder}/schools.csv data.client=school data.label="
ARRAYS = {"grey": (16, 16), "colour": (16, 16, 3), "tokens": (12,)}
"""The shapes of the examples in the .npz files that are written."""
DATA = {
    "images": ["digits", "npz data.path={folder}/grey.npz", "npz data.path={folder}/colour.npz"],
    "tables": ["wine", "breast_cancer", *(SCHOOLS + label for label in ("score", "passed", "kind"))],
    "tokens": ["npz data.path={folder}/tokens.npz"],
}
TABULAR = ("tabular_mlp", "mlp", "linear", "dnn", "mnist_nn")
WIDTHS = {
    **dict.fromkeys(("mlp", "tabular_mlp"), ["", "model.hidden=[]", "model.hidden=[8,8]", "model.hidden=[1]"]),
    **dict.fromkeys(("dnn", "mnist_nn"), ["", "model.hidden=[3]"]),
    **dict.fromkeys(("cnn", "cnn_bn"), ["model.padding=2", "model.channels=[1,2] model.hidden=4 model.padding=2"]),
    **dict.fromkeys(("mnist_cnn", "cifar10_cnn"), ["model.channels=[2,3,4] model.hidden=5", "model.hidden=1"]),
    **dict.fromkeys(
        ("lenet", "lenet_bn"),
        ["model.padding=2", "model.channels=[1,3] model.hidden=[4,3]", "model.channels=[2] model.norm=group"],
    ),
    **dict.fromkeys(
        ("pfedpm_cnn", "pfedpm_cnn_mh", "pfedpm_cnn_narrow"),
        ["model.padding=2", "model.padding=2 model.channels=2 model.hidden=3", "model.channels=1 model.kernel=3"],
    ),
    **dict.fromkeys(
        ("resnet18", "resnet18_mh"),
        [*(f"model.width={width}" for width in (1, 4, 8, 9)), "model.width=8 model.norm=group"],
    ),
    "alexnet": ["model.hidden=1", "model.hidden=8"],
    "text_transformer": ["model.width=4", "model.width=2 model.heads=1 model.layers=1 model.dropout=0.5"],
}
"""Settings of the models; others have their defaults."""
TORCH = ["Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop", "SparseAdam"]
OPTIMIZERS = [
    *("sgd", "adam", "adamw", "rmsprop"),
    *(f"torch.optim.{name}" for name in (*TORCH, "LBFGS", "Adafactor", "Muon")),
]
VALUES = ["0", "1", "-1", "0.5", "2", "1e-9", "1e30", "null", "x", "[]", "true"]
OPTIONS = {
    "precision": ["bf16"],
    "optimizer.keep": ["true"],
    "momentum": ["0.5"],
    "weight_decay": ["0.01"],
    "clip_grad_norm": ["1.0"],
    "lockstep": ["true", "false"],
    "local_steps": ["1", "3"],
    "local_epochs": ["2"],
    "batch_size": ["1", "2", "7", "1000"],
    "lr": ["0.5", "1e-5", "1e5"],
    "lr_schedule": ["cosine", "step", "exponential"],
    "lr_warmup": ["2"],
    "buffers": ["local", "aggregate", "recalibrate"],
    "init": ["per_client", "same"],
    "augment": ["crop_flip"],
    "fraction": ["0.5"],
    "faults.dropout": ["0.5", "1"],
    "faults.straggler": ["0.5"],
    "eval.holdout_clients": ["1", "2"],
    "eval.finetune_epochs": ["2"],
    "eval.every": ["2"],
    "eval.clients": ["participants", "3"],
    "eval.received": ["true"],
    "eval.metrics": ["[macro_f1]", "[nll,macro_f1]"],
    "eval.batch_size": ["1", "3"],
    "on_nonfinite": ["drop", "keep"],
    "on_client_error": ["drop", "abort", "retry(1)"],
    "split.validation": ["0", "0.3"],
    "stop.patience": ["1"],
    "checkpoint.every": ["1"],
    "tracking.per_client": ["false"],
    "trace.rounds": ["[1]", "[0,2]"],
    "model.variants": ["[{hidden: [4]},{hidden: [6]}]", "[]"],
    "clients": ["1", "2", "9"],
    "seed": ["3"],
    "server_optimizer": ["fedavgm", "fedadam", "fedadagrad", "fedyogi", "none"],
    "task": ["regression", "multilabel", "classification"],
    "task.loss": ["HuberLoss", "MultiMarginLoss", "NLLLoss", "l1_loss"],
    "task.class_weights": ["balanced", "balanced_client", "[1,2]"],
    "task.label_smoothing": ["0.1"],
    "task.standardize_target": ["true"],
    "eval.primary": ["auroc", "macro_f1", "rmse", "nll"],
    "lora": ["{r: 2, targets: [fc1]}", "{r: 2}"],
    "freeze": ["[body]", "[body.fc1]", "[head]"],
    "checkpoint.best": ["true"],
    "data.fit": ["client"],
}


def models(kind: str) -> list[str]:
    """Return the built-in models that fit a kind of data, with their settings."""
    names = {path.stem for path in (CONFIGS / "model").glob("*.yaml")} - {"hf"}
    tokens = {name for name in names if name.startswith(("text", "char"))}
    of_kind = {"images": names - tokens - {"tabular_mlp"}, "tables": {*TABULAR}, "tokens": tokens}[kind]
    return [f"{name} {widths}" for name in sorted(of_kind) for widths in WIDTHS.get(name, [""])]


def write_data(folder: Path) -> None:
    """Write arrays of 120 examples, and a table with five schools, in which values are missing."""
    draw, rng = random.Random(0), np.random.default_rng(0)
    for name, shape in ARRAYS.items():
        x = rng.integers(0, 20, (120, *shape)) if name == "tokens" else rng.integers(0, 256, (120, *shape), np.uint8)
        y = rng.integers(0, 4, 120)
        np.savez(folder / f"{name}.npz", x_train=x[:80], y_train=y[:80], x_test=x[80:], y_test=y[80:])
    rows = [
        (school, draw.gauss(school, 3), draw.choice(["a", "b", ""]), draw.choice(["no", "yes"]), draw.choice("xyz"))
        for school in range(5)
        for _ in range(30)
    ]
    lines = ("school,score,sex,passed,kind,intake", *(f"{s},{v},{x},{p},{k},{v / 2:.2f}" for s, v, x, p, k in rows))
    (folder / "schools.csv").write_text("\n".join(lines))


def command(choose: random.Random, folder: Path) -> list[str]:
    """Draw a command line; `folder` has the files of `write_data`."""
    kind = choose.choice(["images", "images", "images", "tables", "tables", "tokens"])
    names = {
        group: sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
        for group in ("method", "partition", "shift", "split")
    }
    words = [f"method={choose.choice(names['method'])}", f"data={choose.choice(DATA[kind])}"]
    words = " ".join(words).format(folder=folder).split()
    words += f"model={choose.choice(models(kind if choose.random() < 0.95 else 'images'))}".split()
    for group, share in (("partition", 0.25), ("shift", 0.1), ("split", 0.15)):
        if choose.random() < share:
            words.append(f"{group}={choose.choice(names[group])}")
    if choose.random() < 0.4:
        words.append(f"optimizer={choose.choice(OPTIMIZERS)}")
    given = {word.partition("=")[0] for word in words}
    for key in choose.sample(sorted(OPTIONS), choose.choice([0, 1, 1, 2, 2, 3])):
        if key not in given:
            words.append(f"{key}={choose.choice(OPTIONS[key])}")
    if choose.random() < 0.25:
        method = yaml.safe_load(as_yaml(composed(parse(words[:1]), config_folders([]))))["method"]
        names = sorted({*method} - {"client", "server"})
        words += [f"method.{choose.choice(names)}={choose.choice(VALUES)}"] if names else []
    base = {} if "data=table" in words else {"clients": "4"}
    base |= {"rounds": "2", "executor": "inline", "progress": "none"}
    return [
        *(f"{key}={value}" for key, value in base.items() if key not in {w.partition("=")[0] for w in words}),
        *words,
    ]


def outcome(words: list[str], folder: Path) -> tuple[str, str]:
    """Run a command line; returns what kind of end it had and what was said."""
    from pflsim import cli

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            status = cli.main([*words, f"run_dir={folder}"])
    except BaseException:
        return "traceback", traceback.format_exc()
    lines = [line for line in said.getvalue().splitlines() if line.startswith("error: ")]
    error = lines[-1] if lines else ""
    keys = {word.partition("=")[0] for word in words} | {
        part for word in words for part in word.partition("=")[0].split(".")
    }
    if "Traceback" in said.getvalue() or "unexpected" in error:
        return "unexpected", said.getvalue()
    if status == 2:
        return (
            ("refused", error)
            if any(key in error for key in keys | {"split", "partition", "model", "eval."})
            else ("no key", error)
        )
    if status == 1:
        return ("not finite", error) if "finite" in error else ("failed", error)
    return ("ran", "") if status == 0 else (f"status {status}", said.getvalue())


def in_child(words: list[str], folder: Path, seconds: float) -> tuple[str, str]:
    """Return the `outcome` of a command line in a process of its own, which a signal or the time limit may end."""

    def run() -> None:
        kind, said = outcome(words, folder)
        sent.send((kind, said.strip()[-1500:]))

    context = multiprocessing.get_context("fork")
    found, sent = context.Pipe(duplex=False)
    process = context.Process(target=run)
    process.start()
    sent.close()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        return "hung", ""
    if process.exitcode:
        return f"signal {-process.exitcode}", ""
    return found.recv()


def main() -> int:
    """Run the configurations and print the counts."""
    for name in ("pandas", "torch.utils.tensorboard", "lightning_modules.quick_import", "ray_actors.run"):
        importlib.import_module(name)  # once, not in every process

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first configuration")
    parser.add_argument("--timeout", type=float, default=120, help="seconds after which one configuration has hung")
    options = parser.parse_args()
    counts, table = Counter[str](), Path(tempfile.mkdtemp(prefix="fuzz-"))
    write_data(table)
    start, slowest = time.perf_counter(), 0.0
    for number in range(options.first, options.count):
        words = command(random.Random(f"{options.seed}/{number}"), table)
        folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
        print(f"{number}\r", end="", file=sys.stderr, flush=True)
        began = time.perf_counter()
        kind, said = in_child(words, folder / "run", options.timeout)
        slowest = max(slowest, time.perf_counter() - began)
        shutil.rmtree(folder)
        counts[kind] += 1
        if kind not in ("ran", "refused", "not finite"):
            print(f"{number} {kind}: {' '.join(words)}\n    {said}", flush=True)
    shutil.rmtree(table)
    print(f"{dict(counts)} in {time.perf_counter() - start:.0f} s, at most {slowest:.1f} s each")
    return int(any(kind not in ("ran", "refused", "not finite") for kind in counts))


if __name__ == "__main__":
    sys.exit(main())
