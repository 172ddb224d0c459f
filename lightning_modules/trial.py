"""A trial before round 1: two rounds of local training on a few examples, with the module that clients will have."""

import io
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_modules.base import ClientModule
from lightning_modules.hosts.client_factory import ClientFactory
from lightning_modules.hosts.client_host import ClientHost
from lightning_modules.hosts.devices import torch_threads
from lightning_modules.model_checks import Notice, remedy
from lightning_modules.optimizers import OptimizerChoice
from pflsim.config.components import component_name
from pflsim.config.settings import Settings
from pflsim.data.dataset import Dataset
from pflsim.data.federated import Partition
from pflsim.engine.execution import EvalRequest, ReplyTask, TrainTask
from pflsim.errors import ClientError, SettingsError, in_one_line
from pflsim.messages import Message
from pflsim.params import Selector, load_state
from pflsim.records.checkpoint_write import to_bytes
from pflsim.seeding import restored_generators, seeded_global
from pflsim.servers.base import Federation, ServerRule

ONE_STEP = 1e-9
"""A share of a stage's mini-batches that is rounded up to one."""


def try_clients(
    factory: ClientFactory,
    data: tuple[Dataset, Partition],
    server: tuple[ServerRule[Any], Federation],
    settings: Settings,
) -> frozenset[str]:
    """Train, save, load and evaluate a client of each variant of the model, and compare its scores.

    Returns:
        The buffers of the net, outside normalisation layers, that training does not change.

    Raises:
        SettingsError: this fails; the message names the optimiser, the precision, the model or the method.
    """
    dataset, partition = data
    few_rows = 3 if factory.num_classes == 2 else 2  # not the outputs, or a loss could take the one for the other
    train = max(partition.train, key=len)[:few_rows]
    val, test = (max(rows, key=len)[:few_rows] for rows in (partition.val, partition.test))
    clients = min(len(factory.models), len(server[1].clients))
    few = replace(partition, train=(train,) * clients, val=(val,) * clients, test=(test,) * clients, sets={})
    training = replace(factory.training, local_epochs=1, local_steps=None)
    if factory.device != "cpu":  # this process uses no GPU, and some optimisers work on GPUs only
        training = replace(training, optimizer=OptimizerChoice(keep=training.optimizer.keep))
    factory = replace(factory, device="cpu", training=training)
    if attackers := factory.attackers:  # whose messages may be refused
        factory = replace(factory, attackers=replace(attackers, clients=frozenset(range(clients))))
    method, model = f"method={component_name(settings, 'method')}", f"model={component_name(settings, 'model')}"
    try:
        return _two_rounds(factory, (dataset, few), server, model)
    except Exception as error:
        cause = error.__cause__ if isinstance(error, ClientError) and isinstance(error.__cause__, Exception) else error
        if isinstance(cause, SettingsError):
            raise cause from error
    plain_task = replace(training.task, choice=replace(training.task.choice, loss=None, options={}))
    others = {
        f"task.loss={training.task.choice.loss}": {"training": replace(training, task=plain_task)},
        "eval.metrics": {"metrics": ()},
        f"optimizer={training.optimizer.name}": {"training": replace(training, optimizer=OptimizerChoice())},
        f"precision={training.precision}": {"training": replace(training, precision="ieee")},
        f"{method} with {model}": {"client": ClientModule, "common": ()},
    }
    others = {f"privacy={component_name(settings, 'privacy')}": {"private_steps": None}, **others}
    others = {f"uplink={component_name(settings, 'uplink')}": {"uplink": None}, **others}
    culprit = model
    for part, change in reversed(others.items()):  # the first one counts
        with suppress(Exception):
            _two_rounds(replace(factory, **change), (dataset, few), server, model)
            culprit = part
    raise SettingsError(f"{culprit}: a trial before round 1 fails: {in_one_line(cause)}{remedy(cause)}") from cause


@restored_generators()
def _two_rounds(
    factory: ClientFactory, data: tuple[Dataset, Partition], server: tuple[ServerRule[Any], Federation], model: str
) -> frozenset[str]:
    rule, federation = server
    host = ClientHost(factory, *data, range(data[1].clients))
    before = {client: dict(host.states[client]) for client in host.clients}
    constant, changed = set[str](), set[str]()
    for client in host.clients:
        module, inputs = host.modules[factory.variant_of(client)], host.shards[client].train.batch(slice(None))[0]
        with torch.no_grad(), seeded_global(factory.seed, "trial"):
            for part in (module.train().net.body, module.net):
                if not isinstance(output := part(inputs.clone()), Tensor):
                    raise SettingsError(f"{model} returns a {type(output).__name__} in training mode, not a Tensor")
        names = Selector(("net",), "without").buffers(module)
        constant.update(names)
        state = module.state_dict()
        changed.update(name for name in names if not _equal(state[name], before[client][name]))
    with torch_threads(factory.threads):
        state = rule.init(federation)
    if rule.initial_round:
        replies = host.run(ReplyTask(), dict.fromkeys(host.clients))
        state = rule.fuse(state, [reply.uplink for reply in replies.values()])
    # most objectives need a message; that of round 1 exists already
    messages: Mapping[int, Message | None] = rule.downlinks(state, host.clients)
    for number in (1, 2):
        replies = host.run(TrainTask(number, dict.fromkeys(host.clients, ONE_STEP)), messages)
        try:
            rule.aggregated(state, [reply.uplink for reply in replies.values()], number)
        except SettingsError as error:  # a rule does not know its method's name
            raise SettingsError(f"method={factory.training.method}: {error}") from error
        host = ClientHost(factory, *data, host.clients)
        for client, reply in replies.items():
            host.states[client] = torch.load(io.BytesIO(to_bytes(reply.state)))
            module = host.modules[factory.variant_of(client)]
            load_state(module, host.states[client])
            try:
                torch.testing.assert_close(dict(module.state_dict()), reply.state, rtol=0, atol=0, equal_nan=True)
            except AssertionError as error:
                raise ValueError(f"a state that is saved and loaded differs: {error}".replace("\n", " ")) from error
            changed.update(n for n in constant & {*reply.state} if not _equal(reply.state[n], before[client][n]))
    first = host.modules[0]
    if first.reported_model == "global" and (weights := rule.global_weights(state)) is not None:
        messages = dict.fromkeys(host.clients, Message(weights=weights))
    request = EvalRequest(first.reported_model, first.reported_phase, host.clients, ("test",), 2)
    host.run(request, messages)
    for client in host.clients:
        with host.module_for(request, client, messages[client]) as module:
            _compare_scores(module, host.shards[client].train.batch(slice(None))[0], model)
    return frozenset(constant - changed)


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _is_single(_: Any, result: Any) -> bool:
    return isinstance(result, Tensor) and result.is_floating_point() and result.dtype != torch.float64


@torch.no_grad()
def _compare_scores(module: ClientModule, inputs: Tensor, model: str) -> None:
    """Check that an example gets the same scores twice, and alone and within a batch."""
    exact = deepcopy(module).double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    given = inputs.clone()
    with Notice(_is_single) as single:
        try:
            scores = exact.predict(inputs)
        except Exception:  # it computes in float32 inside
            exact, inputs = exact.float(), inputs.float() if inputs.is_floating_point() else inputs
            scores = exact.predict(inputs)
    again, alone = exact.predict(inputs), torch.cat([exact.predict(one) for one in inputs.split(1)])
    for found, what in ((again, "called twice"), (alone, "alone and within a batch")):
        if not torch.allclose(found, scores, rtol=(size := 1e-4 if single.found else 1e-6), atol=size, equal_nan=True):
            wanted = "without random numbers and without statistics of the batch there (track_running_stats=True)"
            if not torch.equal(given.to(inputs.dtype), inputs):
                wanted = "that does not change its input in place"
            raise SettingsError(
                f"{model}: in evaluation mode, the scores of an example differ by {(found - scores).abs().max():.2g} "
                f"{what}; expected a model {wanted}"
            )
