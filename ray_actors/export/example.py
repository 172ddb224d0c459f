"""Writes example.py, a script that loads an exported model and predicts with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from functools import partial
from typing import Any

import torch

from lightning_modules.training import Training
from pflsim.data.federated import Examples
from pflsim.engine.execution import EvalRequest
from ray_actors.hosts.client_factory import ClientFactory

TEMPLATE = '''\
"""{title}

Run it with: python example.py. For another exported client: python example.py CLIENT
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

{imports}

HERE = Path(__file__).parent


def load(client: int) -> torch.nn.Module:
    """Return the exported model of a client."""
{build}
    model.load_state_dict(load_file(HERE / f"client_{{client}}{suffix}.safetensors"))
    return model.eval()


if __name__ == "__main__":
    client = int(sys.argv[1]) if len(sys.argv) > 1 else {client}
    examples = load_file(HERE / f"examples_{{client}}.safetensors")  # from the client's {shown} data
    x, y = examples["x"], examples["y"]
{inputs}    with torch.inference_mode():
        predictions = load(client){predict}(x).argmax(1)
    for prediction, label in zip(predictions.tolist(), y.tolist(), strict=True):
        print(f"predicted {{prediction}}, label {{label}}")
'''


@dataclass(frozen=True, slots=True)
class Exported:
    """An exported model.

    Args:
        factory: builds the model.
        request: which model, of which round.
        whole: whether the whole client module is exported, because the net alone cannot predict.
        client: the client.
        suffix: the end of the file's name.
        method: the name of the method.
    """

    factory: ClientFactory
    request: EvalRequest
    whole: bool
    client: int
    suffix: str
    method: str


def example(exported: Exported, shown: Examples, correct: int, total: int) -> str:
    """Return the text of the script.

    Args:
        exported: the model.
        shown: the examples that the script predicts.
        correct: how many test examples of the client the model predicts correctly.
        total: how many test examples the client has.
    """
    request, client = exported.request, exported.client
    whose = f"The personal model of client {client}" if request.model == "personal" else "The server's model"
    score = f"{correct} of client {client}'s {total} test examples right" if total else "there are no test examples"
    return TEMPLATE.format(
        title=f"{whose} after round {request.round_number} of {exported.method}: {score}.",
        imports="\n".join(_imports(exported)),
        build="\n".join(f"    {line}" if line else "" for line in _build(exported)),
        suffix=exported.suffix,
        client=client,
        shown="test" if total else "training",
        inputs="".join(f"    {line}\n" for line in _inputs(shown)),
        predict=".predict_global" if exported.whole and request.model == "global" else "",
    )


def _imports(exported: Exported) -> list[str]:
    targets = [_partial(model).func for model in exported.factory.models[:1]]
    if exported.whole:
        targets += [_partial(exported.factory.client).func, Training]
    return sorted({f"from {target.__module__} import {target.__qualname__}" for target in targets})


def _build(exported: Exported) -> list[str]:
    """Return statements that build `model`."""
    factory, lines = exported.factory, list[str]()
    make, several = _partial(factory.models[0]), len(factory.models) > 1
    sizes = [repr(tuple(factory.input_shape)), repr(factory.num_classes)]
    if several:
        kinds = [_call("dict", [], _partial(model).keywords) for model in factory.models]
        lines += ["kinds = [", *(f"    {kind}," for kind in kinds), "]  # client i has kinds[i % len(kinds)]"]
        net = f"{make.func.__qualname__}({', '.join(sizes)}, **kinds[client % {len(kinds)}])"
    else:
        net = _call(make.func.__qualname__, sizes, make.keywords)
    if not exported.whole:
        return [*lines, f"model = {net}"]
    client = _partial(factory.client)
    training = _call("Training", [], _changed(factory.training))
    model = _call(client.func.__qualname__, ["net", training], client.keywords)
    return [*lines, f"net = {net}", f"model = {model}"]


def _inputs(shown: Examples) -> list[str]:
    """Return statements that turn stored examples into inputs, as `Examples.batch` does."""
    lines = [f"x = x / {shown.scale!r}"] if shown.x.dtype == torch.uint8 else []
    if shown.mean is not None and shown.std is not None:
        shape = (1, -1) + (1,) * (shown.x.dim() - 2)
        for name, values in (("mean", shown.mean), ("std", shown.std)):
            lines += [f"{name} = torch.tensor({list(values)!r}).view{shape!r}"]
        lines += ["x = (x - mean) / std"]
    return lines


def _partial(target: Any) -> partial[Any]:
    return target if isinstance(target, partial) else partial(target)


def _changed(training: Training) -> dict[str, Any]:
    """Return the settings that differ from the defaults."""
    values = ((f.name, f.default, getattr(training, f.name)) for f in fields(training))
    return {name: value for name, default, value in values if default is MISSING or value != default}


def _call(name: str, arguments: Sequence[str], keywords: dict[str, Any]) -> str:
    return f"{name}({', '.join([*arguments, *(f'{key}={value!r}' for key, value in keywords.items())])})"
