"""Checks of the models against the method and the data, before any actor starts."""

import random
import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise, zip_longest
from textwrap import shorten
from typing import Any, get_args

import numpy as np
import torch
import yaml
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_modules.base import ClientModule
from lightning_modules.hosts.client_factory import ClientFactory
from lightning_modules.lockstep.tracing import TracedStep, clone_state
from lightning_modules.nets.frozen import frozen
from lightning_modules.nets.net import Net, evaluating
from lightning_modules.nets.own import OwnNet, own_net
from pflsim.attacks import Attack
from pflsim.config.components import component_name, resolve, targets_of
from pflsim.config.compose import CONFIGS
from pflsim.config.names import listed, written
from pflsim.config.settings import Settings
from pflsim.config.validate import bounded
from pflsim.data.dataset import Dataset
from pflsim.data.federated import Examples, Partition
from pflsim.errors import SettingsError, in_one_line
from pflsim.params import COMMON, NET, NOTHING, Selector
from pflsim.seeding import seeded_global
from pflsim.servers.aggregators import Aggregator
from pflsim.servers.base import MeanRule, ServerRule
from pflsim.servers.local import Local
from pflsim.servers.privacy import ClientPrivacy, Privacy
from pflsim.tasks.task import Task
from pflsim.types import EvalPhase, ModelKind


def fitted(models: Sequence[partial[Net]], dataset: Dataset, settings: Settings) -> tuple[partial[Net], ...]:
    """Return models, with the vocabulary filled in if the data are token sequences.

    Raises:
        SettingsError: a model or `augment` does not take the data's kind of inputs, or a vocabulary is too small.
    """
    if settings.augment != "none" and dataset.kind != "images":
        raise SettingsError(
            f"augment={settings.augment} needs images, but data={component_name(settings, 'data')} has {dataset.kind}; "
            "leave augment out"
        )
    found = []
    for model in models:
        kinds = getattr(model.func, "inputs", Net.inputs)
        if dataset.kind not in kinds:
            raise SettingsError(
                f"model={component_name(settings, 'model')} takes {' or '.join(kinds)}, but "
                f"data={component_name(settings, 'data')} has {dataset.kind}; use model=cnn or mlp for "
                "images, model=tabular_mlp for tables, model=text_transformer for token sequences"
            )
        if dataset.tokens is not None:
            size = model.keywords.get("vocabulary") or dataset.tokens
            bounded("model.vocabulary", size, dataset.tokens)
            model = partial(model, vocabulary=size)
        if dataset.fields:
            if model.func is not own_net:
                raise SettingsError(f"model={component_name(settings, 'model')} takes one tensor, not {dataset.fields}")
            model = partial(model, fields=dataset.fields)
        found.append(model)
    return tuple(found)


def build_variants(factory: ClientFactory, dataset: Dataset, settings: Settings) -> list[ClientModule]:
    """Build a client of each variant of the model, and run its net on one example.

    Raises:
        SettingsError: this fails, or the net does not give features and scores of the right shapes.
    """
    model, outputs = f"model={component_name(settings, 'model')}", factory.num_classes
    x, y = torch.from_numpy(dataset.x[[0]]), torch.from_numpy(dataset.y[[0]])
    inputs, _ = Examples(x, y, dataset.scale, dataset.mean, dataset.std).batch(slice(None))
    if inputs.is_floating_point():
        inputs = inputs.to(torch.get_default_dtype())  # that of the net
    found = []
    for variant in range(len(factory.models)):
        try:
            module = factory.build(variant)
            net = module.net
            with evaluating(net), torch.no_grad(), seeded_global(factory.seed, "trial"):
                features = net.body(inputs.clone())
                scores = net.head(features)
            shapes = [*features.shape], [*scores.shape]
        except SettingsError:
            raise
        except Exception as error:
            what = f"building a client of {component_name(settings, 'method')} with {model}"
            positions = f"; if it has fewer than data.length={dataset.x.shape[-1]} positions, lower it"
            hint = remedy(error) or positions * bool(dataset.tokens)
            raise SettingsError(f"{what} fails: {in_one_line(error)}{hint}") from error
        # a tokenizer may have fewer tokens than its model
        wanted = [1, *inputs.shape[1:], max(outputs, shapes[1][-1])] if dataset.language else [1, outputs]
        if shapes != ([1, *net.feature_shape], wanted):
            what = "next tokens" if dataset.language else f"data of {dataset.num_classes} classes"
            raise SettingsError(
                f"{model}: body and head return {shapes[0]} and {shapes[1]} for one example; expected "
                f"{[1, *net.feature_shape]} and {wanted}, for {what}"
            )
        for name, value in net.state_dict().items():
            if not isinstance(value, Tensor):
                raise SettingsError(f"{model}: {name} in its state_dict is a {type(value).__name__}; expected a Tensor")
        if pair := _overlapping(net):
            raise SettingsError(f"{model}: {listed(pair)} share memory; make them one parameter, or clone one of them")
        for name, parameter in net.named_parameters():
            if not parameter.is_floating_point():
                raise SettingsError(f"{model}: {name} is {parameter.dtype}; expected real floating point parameters")
            if getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise SettingsError(f"{model}: the hook of {name} would never be called; use Tensor.register_hook")
        copies = [part for part in module.modules() if isinstance(part, Net) and part is not net]
        trained = any(parameter.requires_grad for part in copies for parameter in part.parameters())
        if trained and any(parameter._backward_hooks for parameter in net.parameters()):
            raise SettingsError(f"{model}: the method trains a copy, which lacks the hooks of parameters; hook tensors")
        found.append(module)
    return found


def remedy(error: Exception) -> str:
    """Return what to change in a model that raises a known error, as the end of a message; "" for other errors."""
    known = {
        "Half|BFloat16|Double": "return model.float(), and cast nothing to float16 in forward (precision=bf16 does it)",
        "padding token": "set pad_token_id in the model's config to the token that fills short sequences",
        "than 1 value per channel": "give batch normalisation track_running_stats=True, or use nn.GroupNorm",
    }
    return "".join(f"; {advice}" for text, advice in known.items() if re.search(text, str(error)))


def _overlapping(net: nn.Module) -> tuple[str, ...]:
    """Return the names of two tensors that share memory, such as a weight and its transposed view; () if none do."""
    spans = []
    for name, value in (*net.named_parameters(), *net.named_buffers()):
        if value.layout == torch.strided and value.numel():
            last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
            spans.append((value.data_ptr(), value.data_ptr() + (last + 1) * value.element_size(), name))
    spans.sort()
    return next(((one[2], other[2]) for one, other in pairwise(spans) if other[0] < one[1]), ())


def in_lockstep(
    factory: ClientFactory, variants: Sequence[ClientModule], dataset: Dataset, settings: Settings
) -> tuple[ClientFactory, tuple[str, ...]]:
    """Return the factory, without stacks if a model cannot be stacked, and the warnings.

    Raises:
        SettingsError: lockstep=true, but a model cannot be stacked.
    """
    clients = min(2, max(map(len, factory.stacks), default=0))
    nets: list[Any] = [module.net for module in variants]
    nets += [variants[0].common] if variants[0].common_net else []
    for net in nets if clients else ():
        client = ClientModule(deepcopy(net).train(), factory.training)  # without hooks of parameters
        stacked = {name: torch.stack([value] * clients) for name, value in clone_state(client).items()}
        size = clients, factory.training.batch_size
        labels = torch.zeros(*size, *dataset.y.shape[1:], dtype=torch.from_numpy(dataset.y[:1]).dtype)
        kind = torch.get_default_dtype() if dataset.tokens is None else torch.int64
        batch = torch.zeros(*size, *dataset.input_shape, dtype=kind), labels
        own = isinstance(net, OwnNet) or not type(net).__module__.startswith("lightning_modules.")
        parts = [part for _, part in net.named_modules(remove_duplicate=False)]
        try:
            constants = {*frozen(net).values()}
            full = [part for part in parts if {*part.parameters(), *part.buffers()} - constants]
            named = net.named_buffers(remove_duplicate=False)
            buffers = [id(value) for _, value in named if value not in constants]
            if len({*full}) < len(full) or len({*buffers}) < len(buffers):
                raise ValueError("one module or buffer has two names")
            with seeded_global(factory.seed, "trial"), Notice(_hooks) as hooks:
                generators = random.getstate(), str(np.random.get_state())
                client.objective((batch[0][0, :2].clone(), labels[0, :2]))
                if generators != (random.getstate(), str(np.random.get_state())):
                    raise ValueError("a traced step would repeat its numbers from random or numpy.random")
            hooked = any(part._backward_hooks or part._backward_pre_hooks for part in parts)
            if hooks.found or hooked or any(parameter._backward_hooks for parameter in net.parameters()):
                raise ValueError("a traced step would not call the hooks of gradients")
            for width in {1, clients} if client.criterion.loss is not None or own else ():  # alone without vmap
                values, some = (
                    {name: value[:width] for name, value in stacked.items()},
                    (batch[0][:width], labels[:width]),
                )
                TracedStep(client, "objective", NET.parameters(client), values, some, plain=True)
        except Exception as error:
            loss = settings.task.loss
            cause = f"task.loss={loss}" if loss and not own else f"model={component_name(settings, 'model')}"
            problem = f"{cause}: {error}".partition("\n")[0].partition("; set ")[0]
            if settings.lockstep is True:
                raise SettingsError(f"lockstep=true: {problem}") from error
            return replace(factory, stacks=()), (f"clients train one by one, not in lockstep: {problem}",)
    return factory, ()


class Notice(TorchFunctionMode):
    """Notices whether a call of torch inside the block is of a kind.

    Args:
        kind: of the function and its result.
    """

    def __init__(self, kind: Callable[[Any, Any], bool]):
        super().__init__()
        self.kind, self.found = kind, False

    def __torch_function__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.found |= self.kind(function, result)
        return result


def _hooks(function: Any, _: Any) -> bool:  # of a tensor, or of the node of autograd that has computed it
    return getattr(getattr(function, "__self__", function), "__name__", "") in ("register_hook", "grad_fn")


def check_task(method: str, module: ClientModule, task: Task) -> None:
    """Check that a method can do the task.

    Raises:
        SettingsError: the method needs classes, and the model predicts something else, or has one output for two.
    """
    if task.name == "language_model" and "token_targets" not in vars(type(module)):
        takes = _methods(lambda client: "token_targets" in vars(client))
        raise SettingsError(f"method={method} does not predict next tokens (task=language_model); use {takes}")
    if module.needs_classes and (task.name != "classification" or task.one_output):
        found = "one output for two classes" if task.one_output else f"task={task.name}"
        raise SettingsError(
            f"method={method} needs one score for each class, but the run has {found}; "
            f"use task=classification with another loss, or a method without classes: "
            f"{_methods(lambda client: not client.needs_classes)}"
        )


def _methods(fits: Callable[[Any], bool]) -> str:
    """Return the names of the methods whose client fits."""
    nodes = {file.stem: yaml.safe_load(file.read_text("utf-8")) for file in sorted((CONFIGS / "method").glob("*.yaml"))}
    clients: dict[str, Any] = {name: resolve(targets_of(node, "method")["client"]) for name, node in nodes.items()}
    names = [name for name, client in clients.items() if fits(client)]
    return shorten(", ".join(names), 90, placeholder=" ...")


def check_variants(method: str, variants: Sequence[ClientModule]) -> None:
    """Check that models of different architectures agree in what the method shares or compares.

    Args:
        method: its name.
        variants: modules; client i < len(variants) has variant i.

    Raises:
        SettingsError: shared tensors, shared submodules or features differ; the message names the client.
    """
    first = _common(variants[0])
    for client, module in enumerate(variants):
        for here, there in zip_longest(first, _common(module)):
            if here != there:
                raise SettingsError(
                    f"{method} averages or compares what differs here: {here} at client 0, {there} at client {client}; "
                    "change model.variants, or use a method that exchanges prototypes"
                )


def _common(module: ClientModule) -> list[str]:
    """Return lines that must be equal for all clients; shapes alone would miss a stride, for example."""
    parts = dict(module.named_modules())
    lines = [f"features have shape {module.net.feature_shape}"] if module.compares_features else []
    lines += [f"{key} has shape {tuple(value.shape)}" for key, value in module.shared_tensors().items()]
    owners = (name if name in parts else name.rpartition(".")[0] or name for name in module.shared.under)
    shown = [line.strip() for name in dict.fromkeys(owners) if name in parts for line in repr(parts[name]).splitlines()]
    return [*lines, *shown]


def check_reported(method: str, module: ClientModule, evaluated: Sequence[str]) -> None:
    """Check what a method reports, and that it is among `eval.models`.

    Raises:
        SettingsError: a class attribute is wrong, or the reported model is not evaluated.
    """
    for name, expected in (("reported_model", get_args(ModelKind)), ("reported_phase", get_args(EvalPhase))):
        if (value := getattr(module, name)) not in expected:
            raise SettingsError(f"{method}: {name}={value!r}; expected {' or '.join(map(repr, expected))}")
    if (reported := module.reported_model) not in evaluated:
        found = f"eval.models={written(evaluated)}, but method={method} reports its {reported} model"
        raise SettingsError(f"{found}; use eval.models=[{reported}], or leave it out")


def check_messages(
    variants: Sequence[ClientModule],
    rule: ServerRule[Any],
    attack: Attack | None,
    aggregator: Aggregator | None,
    privacy: Privacy,
    settings: Settings,
) -> None:
    """Check that the messages of a method can be attacked, aggregated and protected.

    Raises:
        SettingsError: they cannot.
    """
    method, colludes = f"method={component_name(settings, 'method')}", attack is not None and attack.colludes
    uses = {"attack": attack is not None and (attack.changes or colludes), "aggregator": aggregator is not None}
    uses["privacy"] = isinstance(privacy, ClientPrivacy) and not isinstance(rule, Local)  # which sends nothing
    rounds = range(1, settings.rounds + 1)
    for key in (key for key, used in uses.items() if used):
        what = f"{key}={component_name(settings, key)}"
        if not any(module.shared_parameters() for module in variants):
            raise SettingsError(f"{what} needs clients that send weights, and those of {method} send none")
        if any(module.shared_buffers() for module in variants):
            raise SettingsError(f"{what}: the model's running statistics are sent; set buffers=local or recalibrate")
        if not isinstance(rule, MeanRule) and (key != "attack" or (attack and attack.needs_mean)):
            raise SettingsError(f"{what} needs a server that takes a mean, which that of {method} does not")
        if key == "privacy" and aggregator is not None:
            raise SettingsError(f"{what} and aggregator={component_name(settings, 'aggregator')}: choose one of them")
        if key == "privacy" and (rule.initial_round or any(rule.surveys(t, settings.rounds) for t in rounds)):
            raise SettingsError(f"{what}: {method} has replies besides those to training, which are not protected")
        if key == "privacy" and any(rule.full_participation(t, settings.rounds) for t in rounds):
            raise SettingsError(f"{what}: all clients take part in rounds of {method}, whatever fraction is")
        if key == "attack" and colludes and len(variants) > 1:
            raise SettingsError(f"{what} needs clients with the same model")
        if key == "attack" and colludes and (name := component_name(settings, "uplink")) != "none":
            raise SettingsError(f"{what}: what colluding clients send does not fit uplink={name}; set uplink=none")


def check_phases(method: str, variants: Sequence[ClientModule]) -> None:
    """Check that there are parameters to share and, in every phase, to train.

    Raises:
        SettingsError: body and head share a parameter, all shared parameters are frozen, or a phase has no parameters,
            for example that of the body if the model has only a head.
    """
    for module in variants:
        whole = module.shared in (NET, NOTHING, COMMON)
        if {*module.net.body.parameters()} & {*module.net.head.parameters()} and not whole:
            raise SettingsError(
                f"{method} shares a part of the model, but its body and head have a parameter in common"
            )
        constants, selector = [*frozen(module)], module.shared
        some = constants and (selector == NOTHING or selector.pick(module, constants))
        if some and type(module).shared != NOTHING and not module.shared_parameters():
            raise SettingsError(f"{method} has no parameters to send, because those are frozen; freeze less")
        for phase in {phase.name: phase for stage in module.stages() for phase in stage.phases}.values():
            module.make_step(phase)  # refuses phases without parameters, and wrong options of the optimiser


def objective_warnings(method: str, module: ClientModule) -> tuple[str, ...]:
    """Return a warning if a subclass replaces the loss of some phases only, unless it adds terms to `super()`'s."""
    kinds, code = type(module).__mro__, getattr(type(module).objective, "__code__", None)
    for phase in (phase for stage in module.stages() for phase in stage.phases):
        own, scheduled, used = (_owner(kinds, name) for name in ("objective", "schedule", phase.objective))
        if own < min(scheduled, used) and "objective" not in getattr(code, "co_names", ()):
            here = f"{kinds[used].__name__}.{phase.objective}"
            return (f"{method} trains phase {phase.name} on {here}, and others on {kinds[own].__name__}.objective",)
    return ()


def _owner(kinds: Sequence[type], name: str) -> int:
    """Return the position of the first class that defines an attribute."""
    return next((at for at, kind in enumerate(kinds) if name in vars(kind)), len(kinds) - 1)


def sharing_warnings(method: str, variants: Sequence[ClientModule]) -> tuple[str, ...]:
    """Return a warning if the method shares a part of the model, and this part has no parameters, or all of them."""
    for module in variants:
        shared, everything = {*module.shared_parameters(), *module.shared_buffers()}, Selector(("",))
        part = "a part of the model, but here this part has no parameters, so"
        if not shared and type(module).shared != NOTHING:
            return (f"{method} shares {part} each client trains alone, as in Local",)
        aggregated = module.training_settings.buffers == "aggregate"
        travels = Selector(("net",)).buffers(module) if aggregated else ()  # not what clients keep besides their net
        whole = module.shared.norms == "with" and "net" in module.shared.under
        if not whole and shared and shared.issuperset((*everything.parameters(module), *travels)):
            return (f"{method} does not share {part} all parameters are shared, as in FedAvg",)
    return ()


def check_batches(module: ClientModule, partition: Partition, batch_size: int) -> None:
    """Check that batches are large enough for the model.

    Raises:
        SettingsError: the batch size or a client's shard is too small; the message names the client.
    """
    least = module.smallest_batch
    if batch_size < least:
        raise SettingsError(f"batch_size={batch_size}: a model with batch normalisation needs at least {least}")
    short = [client for client, rows in enumerate(partition.train) if len(rows) < least]
    if short:
        raise SettingsError(
            f"{partition.called(short[0])} has {len(partition.train[short[0]])} training examples, but a model with "
            f"batch normalisation needs at least {least}; use fewer clients, split.validation=0, or a model without it"
        )


def check_validation(method: str, module: ClientModule, partition: Partition) -> None:
    """Check that every client has validation examples, if the method uses them.

    Raises:
        SettingsError: a client has none; the message names the client.
    """
    without = [client for client, rows in enumerate(partition.val) if not len(rows)]
    if (needs := module.needs_validation) and without:
        raise SettingsError(
            f"{method} needs validation examples at every client, but {partition.called(without[0])} has none (so do "
            f"{len(without)} of {partition.clients} clients); set split.validation above 0, and give each client at "
            "least two training examples" + f", or {needs}" * isinstance(needs, str)
        )
