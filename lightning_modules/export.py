"""Loads models from a run folder, and writes them as programs of torch.export and as safetensors."""

from __future__ import annotations

import argparse
import io
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, redirect_stderr
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_modules.base import ClientModule
from lightning_modules.hosts.client_factory import ClientFactory
from lightning_modules.hosts.exchange import MEMORY
from lightning_modules.nets.adjust import Adjustments, save_adapters
from lightning_modules.nets.frozen import frozen, load_frozen
from lightning_modules.nets.net import choose_memory_format
from lightning_modules.nets.own import OwnNet, bind_common, bind_models
from lightning_modules.training import Training
from pflsim.analysis.runs import PartitionFile, read_run
from pflsim.config.components import bind_method, component_name, reading_folder
from pflsim.config.names import nearest
from pflsim.data.federated import scaled
from pflsim.data.record import read_encoder
from pflsim.errors import SettingsError, reading
from pflsim.messages import Message
from pflsim.params import load, load_state
from pflsim.records.checkpoint_read import choose_checkpoint, fitting, from_containers, name_of
from pflsim.records.evaluation import Scope
from pflsim.records.files import read_json, write_atomically
from pflsim.records.saved_settings import saved_settings
from pflsim.records.trace import write_tensors
from pflsim.seeding import seeded_global
from pflsim.servers.base import ServerRule
from pflsim.tasks.metrics import predicted_classes, probabilities
from pflsim.tasks.task import Task
from pflsim.tasks.thresholds import of_class_1
from pflsim.types import ModelKind, Tensors

if TYPE_CHECKING:
    from pandas import DataFrame

BATCH = 4096
"""Rows that are predicted together."""


class LoadedModel(nn.Module):
    """Maps examples [B, ...] as the data source gives them to scores [B, C]; scaling is included.

    Args:
        client: the client's module, with its values.
        predict_global: whether it predicts by the global model.
        about: by name, the method, client and round, and the shape, type and scaling of the inputs.
        encoder: maps the rows of a table or texts to inputs; None: the data are neither.
    """

    mean: Tensor | None
    std: Tensor | None

    def __init__(self, client: ClientModule, predict_global: bool, about: Mapping[str, Any], encoder: Any = None):
        super().__init__()
        self.client, self.predict_global, self.about, self.encoder = client, predict_global, dict(about), encoder
        for name in ("mean", "std"):
            values = about[name]
            self.register_buffer(name, None if values is None else torch.tensor(values), persistent=False)

    def forward(self, inputs: Any) -> Tensor:
        """Return scores [B, C] of inputs [B, ...], of a mapping of them, or of rows of a frame or a list of texts."""
        client = self.client
        if self.encoder is not None and (hasattr(inputs, "columns") or isinstance(inputs, list)):
            inputs = torch.from_numpy(self.encoder(inputs, self.about["client"]))
        elif isinstance(inputs, Mapping):
            inputs = torch.stack([inputs[name] for name in self.about["fields"]], dim=1)
        with client.autocast() if client.training_settings.precision == "bf16" else nullcontext():
            x = scaled(inputs, self.about["scale"], self.mean, self.std)
            return client.criterion.scores(client.predict_global(x) if self.predict_global else client.predict(x))

    def predict_frame(self, frame: DataFrame) -> DataFrame:
        """Return what the model predicts for rows with the columns of the run's table or texts.

        Texts of categories that the training rows do not have are named on standard error; they count as none.

        Returns:
            With the frame's index: the probability of each class and the class as text, or the value; the model, the
            name of its client, and its round.

        Raises:
            SettingsError: a column is missing or has other cells, or the run has no table and no texts.
        """
        from pandas import DataFrame

        if self.encoder is None:
            raise SettingsError("the data of the run are no table and no texts; call the model with its examples")
        if self.client.criterion.task.name == "language_model":
            raise SettingsError("the run predicts next tokens (task=language_model), not one result of each row")
        if unknown := [*self.encoder.unknown(frame)]:
            print(f"categories that no training row has: {'; '.join(unknown)}", file=sys.stderr)
        inputs, task = torch.from_numpy(self.encoder(frame, self.about["client"])), self.client.criterion.task.name
        with torch.no_grad():
            scores = torch.cat([self(part) for part in inputs.split(BATCH)]).float()
        numbers = probabilities(task, scores).float().numpy()
        names = ["value"] if task == "regression" else [f"probability_{value}" for value in self.about["values"]]
        found = DataFrame(numbers, frame.index, names)
        if task == "classification":
            found["class"] = np.array([*self.about["values"], None], object)[self.decide(scores).numpy()]
        return found.assign(model=self.about["model"], client=self.about["name"], round=self.about["round"])

    def decide(self, scores: Tensor) -> Tensor:
        """Return the classes [n] that scores [n, C] stand for, by the threshold; −1 where scores are not finite.

        Raises:
            SettingsError: the run chooses thresholds, but has none of this round.
        """
        threshold = self.about["threshold"]
        if threshold is None:
            return predicted_classes(scores)
        if math.isnan(threshold):
            raise SettingsError(f"no threshold was chosen in round {self.about['round']}: choose another with --round")
        return (of_class_1(scores) >= threshold).long().masked_fill_(~scores.isfinite().all(1), -1)

    def generate(self, prompt: str, **options: Any) -> str:
        """Return a prompt with the text by which a causal model of transformers continues it.

        Args:
            prompt: the text.
            options: arguments of `transformers.GenerationMixin.generate`, such as `max_new_tokens`.

        Raises:
            SettingsError: the model is another one, or the method does not predict by a single net.
        """
        _, model = self._original()
        if not hasattr(model, "generate"):
            raise SettingsError(self._refusal)
        tokens, (end, padding) = torch.tensor(self.encoder.ids([prompt])), self.encoder.marks
        known = {"attention_mask": torch.ones_like(tokens), "eos_token_id": end, "pad_token_id": padding}
        return str(self.encoder.text(model.generate(tokens, **{"use_cache": True, **known, **options})[0].tolist()))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a model of transformers or PEFT in its library's format; with `lora`, write the adapters and the head.

        It maps inputs as the net gets them: images are scaled. With adapters, the folder fits the model that the run
        has started from, for `peft.PeftModel.from_pretrained(model, folder)`.

        Raises:
            SettingsError: the model is another one, or the method does not predict by a single net.
        """
        net, model = self._original()
        if save_adapters(net, model, Path(folder)):
            return
        if not hasattr(model, "save_pretrained"):
            raise SettingsError(self._refusal)
        model.save_pretrained(folder)

    @property
    def _refusal(self) -> str:
        what = f"method={self.about['method']} with model={self.about['net']}"
        return f"{what} does not predict by one model of transformers or PEFT; use pflsim.export, or call the model"

    def _original(self) -> tuple[OwnNet, Any]:
        """Return the net that predicts, and a copy of the user's module in it.

        Raises:
            SettingsError: the method does not predict by a single net.
        """
        client, shape, tokens = self.client, (2, *self.about["shape"]), self.about["tokens"]
        with torch.no_grad(), seeded_global(0, "trial"):
            inputs = torch.randn(shape) if tokens is None else torch.randint(tokens, shape)
            scores = (client.predict_global if self.predict_global else client.predict)(inputs)
            nets = [net for net in client.modules() if isinstance(net, OwnNet) and net(inputs).equal(scores)]
        if not nets:
            raise SettingsError(self._refusal)
        return nets[0], nets[0].original()


class SavedModels:
    """The models of a checkpoint. Neither the data nor the clients' examples are read.

    Args:
        folder: the run folder; the run may still be running.
        round_name: see `pflsim.records.checkpoint_read.choose_checkpoint`.
        trusted: see `pflsim.config.components.reading_folder`.

    Raises:
        SettingsError: the folder or the checkpoint cannot be read, or loading them would run code of others.
    """

    def __init__(self, folder: Path, round_name: str | None = None, trusted: bool = False):
        self._reading = partial(reading_folder, folder, trusted)
        with self._reading():
            self._read(folder, round_name)

    def _read(self, folder: Path, round_name: str | None) -> None:
        self._run = read_run(folder)
        best = self._run.at("best_val")
        self.settings = saved_settings(folder, ("method", "model"))
        self.clients = self.settings.trained
        self.method = component_name(self.settings, "method")
        self.checkpoint = choose_checkpoint(folder / "checkpoints", round_name, best and best.round)
        with reading(folder / "partition.json", "the inputs of the model"):
            record = read_json(folder / "partition.json", PartitionFile)
            self._inputs, self._classes, self._train = (record[key] for key in ("inputs", "classes", "train"))
            task = record.get("task", {"name": "classification", "targets": self._classes})
        self._named = "names" in record
        self.names = list(record.get("names", map(str, range(self.settings.clients))))
        self._values = list(record.get("values", map(str, range(self._classes))))
        self._encoder = read_encoder(folder)
        make_client, self._make_rule = bind_method(self.settings.method)
        nets = bind_models(self.settings, None)
        every, tokens = (*nets, *bind_common(self.settings, make_client, None)), self._inputs["tokens"]
        if tokens is not None:
            every = tuple(partial(net, vocabulary=net.keywords.get("vocabulary") or tokens) for net in every)
        training = replace(Training.of(self.settings), task=Task.of(task, self.settings.task))
        shape, outputs = tuple(self._inputs["shape"]), training.task.outputs
        if fields := tuple(self._inputs.get("fields", ())):
            every = tuple(partial(net, fields=fields) for net in every)
        adjust = replace(Adjustments.of(self.settings), weights=None)  # the run has them
        self.folder, seed = folder, self.settings.seed
        models, common = every[: len(nets)], every[len(nets) :]
        self._factory = ClientFactory(make_client, models, training, shape, outputs, seed, adjust, common=common)

    def _module(self, variant: int = 0) -> ClientModule:
        """Return a module with its initial values."""
        module = self._factory.build(variant)
        load_frozen(self.folder, variant, module.net)
        choose_memory_format(module)  # as in the run: the order of sums depends on it
        return module

    @cached_property
    def _server(self) -> tuple[ServerRule[Any], Any]:
        """The server rule and its state."""
        rule = self._make_rule()
        initial = rule.init(self._module().federation([len(rows) for rows in self._train[: self.clients]]))
        return rule, from_containers(type(initial), self.checkpoint.server())

    @cached_property
    def _downlinks(self) -> dict[int, Message]:
        """The message to each client; all at once, because a rule may compute them in one matrix product."""
        rule, state = self._server
        return rule.downlinks(state, range(self.clients))

    def load(self, client: int | str | None = None, model: ModelKind | None = None) -> LoadedModel:
        """Return a model, in evaluation mode.

        Args:
            client: its name, or its id if no name is a number; None: the server's model, without any client.
            model: the client's own or the server's, with what the client keeps private; None: the reported one.

        Raises:
            SettingsError: there is no such client or model, or the checkpoint does not have it.
        """
        client = None if client is None else self.id_of(client)
        if client is None and model == "personal":
            raise SettingsError("a personal model is a client's: give a client")
        with self._reading():
            return self._load(client, model)

    def _load(self, client: int | None, model: ModelKind | None) -> LoadedModel:
        module = self._module(0 if client is None else self._factory.variant_of(client))
        module.round_number = self.checkpoint.round
        which = "global" if client is None else model or module.reported_model
        phase = "received" if which == "global" else module.reported_phase
        with fitting(self.checkpoint.path):
            if client is not None:
                load_state(module, self._state(client))
            if which == "global":
                self._load_global(module, client)
            elif phase == "received":
                module.receive(self._downlinks[client])  # type: ignore[index]
            if client is not None and module.adapts(which):
                self._load_adapted(module, client, which)
        number, scope = self.checkpoint.round, Scope(which, "test", phase)
        threshold = self._run.threshold(number, client, scope) if self.settings.eval.sensitivity else None
        about = {
            "method": self.method, "client": client, "round": number, "model": which, "phase": phase,
            **{key: self.checkpoint.header.get(key) for key in ("data", "partition_hash", "seed")},
            "net": component_name(self.settings, "model"), "classes": self._classes, **self._inputs,
            "name": "" if client is None else self.names[client], "values": self._values, "threshold": threshold,
        }  # fmt: skip
        return LoadedModel(module, which == "global", about, self._encoder).eval()

    def _state(self, client: int) -> Tensors:
        """Return a client's private state, without what it keeps for the transform of uplinks."""
        return {key: value for key, value in self.checkpoint.client(client).items() if not key.startswith(MEMORY)}

    def id_of(self, client: int | str) -> int:
        """Return the id of a client with this name, or with this id if names are no numbers.

        Raises:
            SettingsError: no checkpoint has such a client.
        """
        if str(client) in self.names:
            client = self.names.index(str(client))
        elif isinstance(client, str) or self._named and any(map(str.isdecimal, self.names)):
            raise SettingsError(f"client {client}: {nearest(str(client), self.names)}")
        if not 0 <= client < self.clients:
            late = " joined after the last round, so no checkpoint has its model" * (client < self.settings.clients)
            raise SettingsError(f"client {client}{late}: choose one of the clients 0 to {self.clients - 1}")
        return client

    def _load_global(self, module: ClientModule, client: int | None) -> None:
        rule, state = self._server
        weights = rule.global_weights(state)
        if weights is None:
            raise SettingsError(f"{self.method} has no global model")
        part = "common." if module.common_net else "net."
        own = [
            key
            for key, value in module.state_dict().items()
            if key.startswith(part) and key not in {*weights, *module.shared_buffers()} and value.is_floating_point()
        ]
        if client is None and own:
            raise SettingsError(
                f"the global model of {self.method} has no {own[0]}, which is each client's: give a client"
            )
        load(module, weights)

    def _load_adapted(self, module: ClientModule, client: int, model: ModelKind) -> None:
        """Load what the run has adapted to the client's examples."""
        adapted = self.checkpoint.adapted(client) if model == module.reported_model else None
        if adapted is None:
            raise SettingsError(
                f"{name_of(self.checkpoint.path)} does not have the {model} model of {self.method} adapted to the "
                f"examples of client {client}: checkpoints have the reported model, unless the run was interrupted"
            )
        load_state(module, {**self._state(client), **adapted})


def export_program(model: LoadedModel) -> torch.export.ExportedProgram:
    """Return a program of a model, for any number of examples.

    Raises:
        SettingsError: torch.export cannot export the model.
    """
    about = model.about
    example = torch.zeros(2, *about["shape"], dtype=getattr(torch, about["dtype"]))
    with ExitStack() as stack:
        for name in ("conv", "rnn"):  # a GPU may have set "ieee" in this process, which torch.export cannot read
            flag = getattr(torch.backends.cudnn, name)
            stack.callback(setattr, flag, "fp32_precision", flag.fp32_precision)
            flag.fp32_precision = "tf32"
        stack.callback(logging.disable, logging.NOTSET)
        logging.disable(logging.WARNING)  # torch.export logs and prints pages before it raises an error
        stack.enter_context(redirect_stderr(io.StringIO()))
        try:
            return torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        except Exception as error:  # torch.export raises errors of many types
            reason = str(error).strip().partition("\n")[0]
            what = f"{about['method']} with model={about['net']}"
            raise SettingsError(f"torch.export cannot export {what}: {reason}; pflsim.load_model works") from error


def write(model: LoadedModel, folder: Path, name: str) -> tuple[Path, int]:
    """Write `name`.pt2 and `name`.safetensors, the client module's state; returns the first and the tensors' number."""
    file = io.BytesIO()
    torch.export.save(export_program(model), file)
    tensors = {**model.client.state_dict(), **frozen(model.client)}
    state = {k: v for k, v in tensors.items() if not k.startswith("kept_optimizers.")}
    metadata = {key: str(value) for key, value in model.about.items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{name}.pt2", file.getvalue())
    write_tensors(folder / f"{name}.safetensors", state, metadata)
    return folder / f"{name}.pt2", len(state)


def choose_model(add: Callable[..., Any]) -> None:
    """Add the options that choose a model, besides its client."""
    add("run", type=Path, metavar="RUN", help="the run folder; the run may still be running")
    add("--round", metavar="ROUND", help="best, last or a number; default: best, or last if best was not saved")
    whose = "the client's model or the server's; default: the reported model"
    add("--model", choices=["personal", "global"], help=whose)
    trusted = "also run code from outside pflsim that the folder names, and read pickles in it"
    add("--trusted", action="store_true", help=trusted)


def options(add: Callable[..., Any]) -> None:
    """Add the options of the command."""
    choose_model(add)
    add("--client", metavar="N", help="id or name, several ids with commas (1,2,5), or all; default: the global model")
    add("--out", type=Path, metavar="DIR", help="the folder to write to; default: RUN/export")


def execute(given: argparse.Namespace) -> None:
    """Write models from a run folder as programs of torch.export and as safetensors.

    `export RUN --client 3` writes client_3.pt2 and client_3.safetensors. `torch.export.load("client_3.pt2").module()`
    maps examples [B, ...] as the data source gives them to scores [B, C], without pflsim.
    """
    saved = SavedModels(given.run, given.round, given.trusted)
    for path, tensors, round_number in exported(saved, given.client, given.model, given.out or given.run / "export"):
        print(f"{path}, {path.stem}.safetensors: {tensors} tensors of round {round_number}")


def exported(
    saved: SavedModels, clients: str | None, model: ModelKind | None, out: Path
) -> Iterator[tuple[Path, int, int]]:
    """Write models of a run, see `options`; yields the file of each program, its number of tensors, and their round."""
    for client in _clients(clients, saved):
        loaded = saved.load(client, model)
        whose = "global" if client is None else f"client_{saved.names[loaded.about['client']].replace('/', '%2F')}"
        other = client is not None and loaded.predict_global != (loaded.client.reported_model == "global")
        name = f"{whose}_{loaded.about['model']}" if other else whose
        yield *write(loaded, out, name), saved.checkpoint.round


def _clients(text: str | None, saved: SavedModels) -> Sequence[int | str | None]:
    """Return the clients that `--client` names."""
    if text is None:
        return [None]
    if text == "all":
        return saved.names[: saved.clients]
    if text in saved.names:
        return [text]
    parts = [part.strip() for part in text.split(",")]
    if not all(map(is_id, parts)):
        raise SettingsError(f"--client {text}: expected a number, several with commas, or all")
    return sorted({int(part) for part in parts})


def is_id(text: str) -> bool:
    """Return whether a text is the id of a client as ids are written: 7, but not 07, which may be a name."""
    return text.isdecimal() and str(int(text)) == text
