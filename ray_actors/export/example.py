"""The text of example.py, which loads an exported model and predicts with it."""

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

python example.py; of another client that was exported: python example.py N
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

{imports}

HERE = Path(__file__).parent


def load(client: int) -> torch.nn.Module:
    """The model of a client that was exported."""
{build}
    model.load_state_dict(load_file(HERE / f"client_{{client}}{suffix}.safetensors"))
    return model.eval()


if __name__ == "__main__":
    client = int(sys.argv[1]) if len(sys.argv) > 1 else {client}
    shown = load_file(HERE / f"examples_{{client}}.safetensors")  # of the client's {shown} data
    x, y = shown["x"], shown["y"]
{inputs}    with torch.inference_mode():
        guesses = load(client){predict}(x).argmax(1)
    for guess, label in zip(guesses.tolist(), y.tolist(), strict=True):
        print(f"predicted {{guess}}, is {{label}}")
'''


@dataclass(frozen=True, slots=True)
class Exported:
    """What an example is about.

    Args:
        factory: how its model is built.
        request: which model, of which round.
        whole: whether the whole client module was exported, since it takes more than the net to predict.
        client: of whom.
        suffix: of the file's name.
        method: what the method is called.
    """

    factory: ClientFactory
    request: EvalRequest
    whole: bool
    client: int
    suffix: str
    method: str


def example(exported: Exported, shown: Examples, right: int, tested: int) -> str:
    """The text.

    Args:
        exported: what was.
        shown: the examples that it predicts for.
        right: how many test examples of the client the model gets right.
        tested: how many there are.
    """
    request, client = exported.request, exported.client
    whose = f"The personal model of client {client}" if request.model == "personal" else "The server's model"
    score = f"{right} of client {client}'s {tested} test examples right" if tested else "there are no test examples"
    return TEMPLATE.format(
        title=f"{whose} after round {request.round_number} of {exported.method}: {score}.",
        imports="\n".join(_imports(exported)),
        build="\n".join(f"    {line}" if line else "" for line in _build(exported)),
        suffix=exported.suffix,
        client=client,
        shown="test" if tested else "training",
        inputs="".join(f"    {line}\n" for line in _inputs(shown)),
        predict=".predict_global" if exported.whole and request.model == "global" else "",
    )


def _imports(exported: Exported) -> list[str]:
    targets = [_partial(model).func for model in exported.factory.models[:1]]
    if exported.whole:
        targets += [_partial(exported.factory.client).func, Training]
    return sorted({f"from {target.__module__} import {target.__qualname__}" for target in targets})


def _build(exported: Exported) -> list[str]:
    """Statements that make `model`."""
    factory, lines = exported.factory, list[str]()
    make, several = _partial(factory.models[0]), len(factory.models) > 1
    sizes = [repr(tuple(factory.input_shape)), repr(factory.num_classes)]
    if several:
        kinds = [_call("dict", [], _partial(model).keywords) for model in factory.models]
        lines += ["kinds = [", *(f"    {kind}," for kind in kinds), "]  # the clients have them in turn"]
        net = f"{make.func.__qualname__}({', '.join(sizes)}, **kinds[client % {len(kinds)}])"
    else:
        net = _call(make.func.__qualname__, sizes, make.keywords)
    if not exported.whole:
        return [*lines, *_wrapped("model", net)]
    client = _partial(factory.client)
    training = _call("Training", [], _changed(factory.training))
    model = _call(client.func.__qualname__, ["net", training], client.keywords)
    return [*lines, *_wrapped("net", net), *_wrapped("model", model)]


def _inputs(shown: Examples) -> list[str]:
    """Statements that make inputs of what is stored, as `Examples.batch` does."""
    lines = [f"x = x / {shown.scale!r}"] if shown.x.dtype == torch.uint8 else []
    if shown.mean is not None and shown.std is not None:
        shape = (1, -1) + (1,) * (shown.x.dim() - 2)
        for name, values in (("mean", shown.mean), ("std", shown.std)):
            lines += [f"{name} = torch.tensor({list(values)!r}).view{shape!r}"]
        lines += ["x = (x - mean) / std"]
    return lines


def _partial(made: Any) -> partial[Any]:
    """A part with its settings, which may be none."""
    return made if isinstance(made, partial) else partial(made)


def _changed(training: Training) -> dict[str, Any]:
    """The run's numbers that are not the defaults."""
    values = ((f.name, f.default, getattr(training, f.name)) for f in fields(training))
    return {name: value for name, default, value in values if default is MISSING or value != default}


def _call(name: str, arguments: Sequence[str], keywords: dict[str, Any]) -> str:
    return f"{name}({', '.join([*arguments, *(f'{key}={value!r}' for key, value in keywords.items())])})"


def _wrapped(name: str, call: str, width: int = 110) -> list[str]:
    """An assignment on one line or, where that is too long, with what is in the brackets on its own."""
    if len(name) + len(call) + 7 <= width:
        return [f"{name} = {call}"]
    head, _, rest = call.partition("(")
    return [f"{name} = {head}(", f"    {rest.removesuffix(')')}", ")"]
