"""What clients of a stack receive and reply, for all of them at once where their class leaves these hooks as they are.

Hooks take longer than the arithmetic of a small model, client by client.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite

import torch
from torch import Tensor

from lightning_modules.anchor import Anchor
from lightning_modules.base import ClientModule
from lightning_modules.hosts.failures import nonfinite
from lightning_modules.lockstep.batch_schedule import ClientTraining
from lightning_modules.lockstep.stack_training import stacked
from pflsim.data.federated import Shard
from pflsim.errors import SettingsError
from pflsim.messages import Message, Uplink, payload_bytes
from pflsim.params import padded, snapshot
from pflsim.transforms.base import Sender, Transform
from pflsim.types import Tensors, TrainReport

RECEIVING = (
    "receive", "before_training", "replaces_body", "load_model", "anchors", "clear_anchors", "recalibrate", "stages",
)  # fmt: skip
REPLYING = ("reply", "shared_tensors", "shared_parameters", "shared_buffers", "state_dict")
CPU = torch.device("cpu")
MEMORY = "uplink_memory."
"""Begins the names of what a client keeps for the run's transform of uplinks, see `ClientFactory.build`."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a client's task.

    Args:
        report: steps, losses and times.
        uplink: the message to the server; None after fine-tuning.
        state: the new private state; None if the task does not change it.
        nonfinite: which losses and values of the uplink are not finite.
    """

    report: TrainReport
    uplink: Uplink | None = None
    state: Tensors | None = None
    nonfinite: str = ""


def unchanged(module: ClientModule, hooks: Sequence[str]) -> bool:
    """Return whether a module has these hooks of `ClientModule`, and they only copy tensors."""
    settings = module.training_settings
    copies = settings.buffers != "recalibrate" and settings.task.choice.class_weights != "balanced_client"
    return copies and all(getattr(type(module), hook) is getattr(ClientModule, hook) for hook in hooks)


def receives_alike(module: ClientModule) -> bool:
    """Return whether clients receive by copies of tensors only, and then train by one schedule."""
    known = ours(module, "schedule") and all(type(anchor) is Anchor for anchor in module.anchors())
    return known and unchanged(module, RECEIVING)


def ours(module: ClientModule, hook: str) -> bool:
    """Return whether a hook is defined in this package; one of a user may depend on anything."""
    return getattr(type(module), hook).__module__.startswith("lightning_modules.")


def anchored(module: ClientModule) -> dict[str, str]:
    """Return for each tensor that an anchor stores of a message its name in the module and in the message."""
    anchors = [(prefix, part) for prefix, part in module.named_modules() if part in module.anchors()]
    return {
        f"{prefix}.{name.replace('.', '/')}": sent for prefix, anchor in anchors for name, sent in anchor.names.items()
    }


def received(
    template: Tensors, anchors: Mapping[str, str], state: Tensors, message: Message | None
) -> dict[str, Tensor] | None:
    """Return the tensors with which a client begins, by name: its stored and received ones themselves.

    Args:
        template: the parameters and buffers of another client that has received, for their layout, and for their values
            where no state has them.
        anchors: see `anchored`.
        state: the client's private state.
        message: its downlink; None: its state alone.

    Returns:
        None if they are not laid out as the template.
    """
    values = {name: state.get(name, value) for name, value in template.items()}
    if message is not None:
        sent = message.weights
        if not sent.keys() >= {*anchors.values()}:
            return None  # `receive` says which one is missing
        values |= sent
        values |= {name: sent[key] for name, key in anchors.items()}
    if len(values) > len(template):
        return None
    return values if all(_alike(values[name], like) for name, like in template.items()) else None


def _alike(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def untransformable(uplink: Uplink, received: Message) -> str:
    """Return what an uplink has besides weights that its client has received in this round; "" if nothing."""
    parts = {"prototypes": uplink.prototypes, "other tensors": uplink.extra, "numbers": uplink.numbers}
    parts["weights that they did not receive"] = uplink.weights.keys() - received.weights.keys()
    return next((what for what, content in parts.items() if content), "")


def sent(
    reply: Reply,
    received: Message,
    module: ClientModule,
    transform: Transform | None,
    sender: Sender,
    attack: Callable[[Tensors], Tensors] | None = None,
) -> Reply:
    """Return the reply to local training as a transform sends it: with the weights that the server then knows.

    Args:
        reply: with the client's new state, which has the memory of the transform.
        received: the downlink of the round.
        module: of the client, for the names of the shared parameters, whose change is transformed.
        transform: of the run.
        sender: the client.
        attack: what a malicious client does to its change before.

    Raises:
        SettingsError: see `untransformable`.
    """
    uplink, state, known = reply.uplink, reply.state, received.weights
    assert uplink is not None and state is not None
    if what := untransformable(uplink, received):
        which = ("an uplink transform", "uplink") if transform else ("this attack", "attack")
        why = f"its clients send {what}, and {which[0]} takes weights only; set {which[1]}=none"
        raise SettingsError(f"method={module.training_settings.method}: {why}")
    names = [name for name in module.shared_parameters() if name in uplink.weights]
    if not names:
        return reply
    change = {name: uplink.weights[name].double() - known[name].double() for name in names}  # exact for float32
    change = attack(change) if attack else change
    kept = {key.removeprefix(MEMORY).replace("/", "."): key for key in state if key.startswith(MEMORY)}
    memory = {name: state[key] for name, key in kept.items()}
    # of what is sent: a client may send the first entries of a tensor only
    before = {
        name: value[tuple(map(slice, change[name].shape)) if name in change else ...] for name, value in memory.items()
    }
    values, after, size = transform(change, before, sender) if transform else (change, before, None)
    weights = {name: (known[name].double() + values[name]).to(uplink.weights[name].dtype) for name in names}
    others = sum(value.nbytes for name, value in uplink.weights.items() if name not in weights)
    uplink = replace(uplink, weights={**uplink.weights, **weights}, size=size and size.nbytes + others)
    report = replace(reply.report, up_bytes=payload_bytes(uplink))
    new = {kept[name]: padded(after[name], value) for name, value in memory.items()}
    return replace(reply, report=report, uplink=uplink, state={**state, **new})


def replies(
    first: Reply,
    trainings: Sequence[ClientTraining],
    losses: Sequence[Mapping[str, float]],
    shards: Sequence[Shard],
    stored_together: bool,
) -> list[Reply]:
    """Return the replies of clients of a stack.

    Args:
        first: the reply of another client of the stack, for the names of the tensors.
        trainings: after training.
        losses: their mean loss terms.
        shards: the clients' examples.
        stored_together: whether the new states are stored and replaced together, so that they may share memory.
    """
    assert first.uplink is not None and first.state is not None
    memory = {name: stacked([training.values[name] for training in trainings], CPU) for name in first.state}
    if len(trainings) == 1:  # not copied yet, and training may use its memory again
        memory = snapshot(memory)
    weights = [memory[name] for name in first.uplink.weights if memory[name].is_floating_point()]
    sums = [value.sum([*range(1, value.dim())]) if value.dim() > 1 else value for value in weights]
    finite = torch.stack(sums).isfinite().all(0).tolist() if sums else [True] * len(trainings)
    rows = {name: value.unbind() for name, value in memory.items()}
    found = list[Reply]()
    for at, (training, means, own) in enumerate(zip(trainings, losses, shards, strict=True)):
        state = {name: values[at] for name, values in rows.items()}
        sent = {name: state[name] for name in first.uplink.weights}
        uplink = Uplink(weights=sent, client=own.client, num_examples=own.weight)
        note = "" if finite[at] and all(map(isfinite, means.values())) else nonfinite(uplink, means)
        report = replace(
            first.report, client=own.client, num_examples=own.num_examples, steps=training.taken, losses=means
        )
        found.append(Reply(report, uplink, state if stored_together else snapshot(state), note))
    return found
