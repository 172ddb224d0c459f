"""Predictions for the clients of a group together: one model for the examples of all, or their models as a stack."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn.utils.rnn import pad_sequence

from lightning_modules.base import ClientModule
from lightning_modules.hosts.exchange import RECEIVING, anchored, ours, received, unchanged
from lightning_modules.hosts.server_host import identity
from lightning_modules.lockstep.stack_training import stacked
from lightning_modules.lockstep.tracing import AsForward, state_of
from pflsim.data.federated import FORWARD_BATCH, Examples
from pflsim.engine.execution import EvalRequest
from pflsim.messages import Message
from pflsim.tasks.language import token_sums
from pflsim.tasks.metrics import predicted_classes, sums_by_client
from pflsim.tasks.task import Criterion, in_float32
from pflsim.types import Tensors

STACKED = {"activation", "batchnorm", "container", "lightning_modules", "linear", "normalization"}
"""Files of torch.nn.modules, and packages, whose layers are faster for a stack of models on a CPU; convolutions are
slower."""
STACK_ROWS = 1024
"""Examples at most that are computed together, unless one client has more or `eval.batch_size` is given."""
STACK_BYTES = {"cpu": 2**26, "cuda": 2**30}
"""Bytes of a stack of models at most, by device."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """Outputs for the examples of some clients, one client after another.

    Args:
        clients: their ids.
        sizes: their numbers of examples.
        outputs: [n, O].
        targets: [n] or [n, T].
    """

    clients: Sequence[int]
    sizes: Sequence[int]
    outputs: Tensor
    targets: Tensor

    def counts(self, criterion: Criterion, batch_size: int) -> Tensor:
        """Return for each client what `lightning_modules.predictions.totals` sums, [clients, 2 or 3] float64.

        Args:
            criterion: the loss.
            batch_size: examples of a client of which the loss is a mean, if it has no value for each example.
        """
        if criterion.task.name == "language_model":
            return sums_by_client(token_sums(in_float32(self.outputs), self.targets), self.sizes)
        each, right = criterion.each(self.outputs, self.targets), self.targets.new_zeros(len(self.targets))
        if criterion.task.name == "classification":
            right = predicted_classes(criterion.scores(self.outputs)) == self.targets
        if each is None:
            pairs = zip(self.outputs.split(self.sizes), self.targets.split(self.sizes), strict=True)
            totals = [[criterion.total(*some) for some in _batches(*pair, batch_size)] for pair in pairs]
            loss = torch.stack([torch.stack(some).double().sum() for some in totals])
        else:
            loss = sums_by_client(each, self.sizes)
        return torch.stack((sums_by_client(right, self.sizes), loss), 1)


def allowed(module: ClientModule, request: EvalRequest) -> bool:
    """Return whether clients may be evaluated together: no hook adapts a model to a client first."""
    receives = request.model == "personal" and request.phase == "received"
    own = receives and (request.joining or not unchanged(module, RECEIVING))
    weighted = module.training_settings.task.choice.class_weights == "balanced_client"
    known = request.model == "personal" or ours(module, "predict_global")  # a trial compares `predict` alone
    return known and not own and not weighted and not module.adapts(request.model)


class GroupPredictor:
    """Predicts for clients that `allowed` lets be evaluated together.

    Outputs are those of one client after another up to rounding. What is computed together depends on the request, the
    messages and the numbers of examples only.

    Args:
        module: with the first client's values, in evaluation mode.
        request: what is evaluated.
        states: the private states.
        initial: the state of clients that have not trained; they predict as with a shared model.
        messages: the message of each client, see `ClientHost.run`.
        batch_size: examples per forward pass; None: the default of the device.
    """

    def __init__(
        self,
        module: ClientModule,
        request: EvalRequest,
        states: Mapping[int, Tensors],
        initial: Tensors,
        messages: Mapping[int, Message | None],
        batch_size: int | None = None,
    ):
        self.module, self.initial = module, initial
        self.limit, self.rows = batch_size or FORWARD_BATCH[module.device.type], batch_size or STACK_ROWS
        self.name = "predict_global" if request.model == "global" else "predict"
        first, *others = messages.values()
        own, state = not unchanged(module, ("predict", "predict_global")), states[next(iter(messages))]
        needed = {
            name for name in state if (own or name.startswith("net.")) and not name.endswith("num_batches_tracked")
        }
        covered = first is not None and needed <= {*first.weights, *module.constant_buffers}
        self.shared = covered and all(o is first or (o and first and identity(o) == identity(first)) for o in others)
        """Whether one message has all tensors with which the clients predict."""
        layers = {type(part) for part in module.modules() if [*part.parameters(recurse=False)]} - {type(module)}
        files = {layer.__module__.removeprefix("torch.nn.modules.").partition(".")[0] for layer in layers}
        template = state_of(module)
        anchors = anchored(module) if request.model == "personal" and request.phase == "received" else {}
        self.values: dict[int, Tensors | None] = {}
        """By client the tensors of its model; None if they differ from those of the first one in shape."""
        self._last: tuple[Sequence[int], Tensors] = (), {}
        fast = module.net.stackable and (files <= STACKED or module.device.type == "cuda")
        if not self.shared and fast:
            self.values = {c: received(template, anchors, states[c], message) for c, message in messages.items()}

    @torch.inference_mode()
    def predict(self, examples: Mapping[int, Examples]) -> Iterator[Predictions]:
        """Yield predictions for these clients' examples, of each at least one; leaves out those that are alone."""
        if self.shared:
            yield from self._pooled([*examples], examples, getattr(self.module, self.name))
            return

        size = sum(value.nbytes for value in self.module.state_dict(keep_vars=True).values())

        def fits(number: int, total: int, longest: int, shortest: int) -> bool:
            """Return whether clients in descending order of their examples have few, and at most half are padding."""
            few = number * longest <= self.rows and number * size <= STACK_BYTES[self.module.device.type]
            return few and longest <= 2 * shortest

        stackable = [client for client in examples if self.values.get(client) and len(examples[client]) <= self.limit]
        # by value, because the states of a resumed run are other objects
        if len(untrained := {client: None for client in stackable if self._is_initial(client)}) > 1:
            stackable = [client for client in stackable if client not in untrained]
            names, device = self.values[next(iter(untrained))] or {}, self.module.device
            values = {f"module.{name}": self.initial[name].to(device, copy=True) for name in names}
            model = AsForward(self.module, self.name)
            yield from self._pooled([*untrained], examples, lambda inputs: functional_call(model, values, (inputs,)))
        for clients in _divided(sorted(stackable, key=lambda c: (-len(examples[c]), c)), examples, fits):
            if len(clients) > 1:  # one alone would compute on its stored state
                yield self._stacked(clients, [examples[client] for client in clients])

    def _pooled(
        self, clients: Sequence[int], examples: Mapping[int, Examples], predict: Callable[[Tensor], Tensor]
    ) -> Iterator[Predictions]:
        for some in _divided(clients, examples, lambda number, total, first, last: total <= self.rows):
            pool = _joined([examples[client] for client in some], torch.cat)
            outputs = torch.cat([predict(inputs) for inputs, _ in pool.in_turn(self.limit)])
            yield Predictions(some, [len(examples[client]) for client in some], outputs, pool.y)

    def _is_initial(self, client: int) -> bool:
        found = self.values[client] or {}
        return all(
            value is (first := self.initial.get(name)) or first is not None and torch.equal(value.cpu(), first)
            for name, value in found.items()
        )

    def _stacked(self, clients: Sequence[int], parts: Sequence[Examples]) -> Predictions:
        if clients != self._last[0]:  # splits have mostly the same stacks
            found: list[Tensors] = [self.values[client] or {} for client in clients]
            self._last = (
                clients,
                {f"module.{n}": stacked([own[n] for own in found], self.module.device) for n in found[0]},
            )
        sizes, longest = [len(part) for part in parts], max(map(len, parts))
        padded = _joined(parts, lambda tensors: pad_sequence(tensors, batch_first=True).flatten(0, 1))
        inputs, targets = padded.batch(slice(None))
        predict = vmap(lambda values, own: functional_call(AsForward(self.module, self.name), values, (own,)))
        outputs = predict(self._last[1], inputs.unflatten(0, (len(parts), longest))).flatten(0, 1)
        rows = torch.arange(len(outputs), device=outputs.device).view(len(parts), longest)
        kept = torch.cat([own[:size] for own, size in zip(rows, sizes, strict=True)])
        return Predictions(clients, sizes, outputs[kept], targets[kept])


def _batches(outputs: Tensor, targets: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(outputs.split(size), targets.split(size), strict=True)


def _divided(
    clients: Iterable[int], examples: Mapping[int, Examples], fits: Callable[[int, int, int, int], bool]
) -> Iterator[list[int]]:
    """Divide clients into pieces in their order, each as long as it fits, of one at least.

    Args:
        clients: their ids.
        examples: of each client.
        fits: whether a piece fits, by its numbers of clients and examples, and those of its first and last client.
    """
    piece, total = list[int](), 0
    for client in clients:
        own = len(examples[client])
        if piece and not fits(len(piece) + 1, total + own, len(examples[piece[0]]), own):
            yield piece
            piece, total = [], 0
        piece.append(client)
        total += own
    if piece:
        yield piece


def _joined(parts: Sequence[Examples], join: Callable[[list[Tensor]], Tensor]) -> Examples:
    return replace(parts[0], x=join([part.x for part in parts]), y=join([part.y for part in parts]))
