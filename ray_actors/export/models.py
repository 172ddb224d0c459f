"""Exports models of a checkpoint: builds them as an evaluation does, and compares them with the recorded counts."""

from __future__ import annotations

import math
import runpy
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from lightning_modules.evaluation import count
from lightning_modules.nets.own import OwnNet
from pflsim.analysis.results import read_run
from pflsim.data.federated import Examples
from pflsim.errors import RunError, SettingsError
from pflsim.messages import Message
from pflsim.params import snapshot
from pflsim.run_folder.checkpoint.meta import BadCheckpoint
from pflsim.run_folder.checkpoint.read import choose_checkpoint
from pflsim.run_folder.files import write_atomically
from pflsim.run_folder.metrics import Model, Scope
from pflsim.run_folder.resume import saved_settings
from ray_actors.export.example import example
from ray_actors.export.source import Source, chosen_clients, find_source
from ray_actors.hosts.client_host import ClientHost
from ray_actors.hosts.server_host import ServerHost

EXAMPLES = 8
"""The number of a client's examples that are exported with its model."""


def export(
    folder: Path, clients: str, round_name: str, model: Model | None, out: Path | None, data: str | None
) -> list[str]:
    """Export models of a run, and a script that loads them.

    Args:
        folder: the run folder.
        clients: a number, several with commas, or `all`.
        round_name: `best`, `last` or a number.
        model: the model to export; None: the reported model.
        out: the folder to write to; None: `export` in the run folder.
        data: the folder or file of the data; None: as in the settings.

    Returns:
        Lines that describe what was exported.

    Raises:
        SettingsError: the models cannot be exported. Nothing was written.
        RunError: a model does not reproduce the recorded counts. Nothing was written.
    """
    run, settings = read_run(folder), saved_settings(folder)
    chosen = chosen_clients(clients, settings)
    checkpoint = choose_checkpoint(folder / "checkpoints", round_name)
    source = find_source(run, settings, checkpoint, model, data)
    try:
        host, messages = _restore(source, chosen)
    except BadCheckpoint as bad:
        raise SettingsError(f"{checkpoint.path} is damaged: {bad}; choose another one with --round") from bad
    target = out or folder / "export"
    try:
        return _write(source, host, messages, target)
    except BaseException:
        with suppress(OSError):  # which says that the folder is not empty
            target.rmdir()
        raise


def _restore(source: Source, clients: tuple[int, ...]) -> tuple[ClientHost, dict[int, Message]]:
    """Return a host with the clients' states of the checkpoint, and the messages that the evaluation needs."""
    prepared, request, checkpoint = source.prepared, source.request, source.checkpoint
    placement = prepared.settings.placement
    server = ServerHost(prepared.rule, prepared.federation, placement.threads, placement.server_device)
    server.restore(checkpoint.server())
    host = ClientHost(replace(prepared.factory, stacks=()), prepared.dataset, prepared.partition, clients)
    host.states.update({client: checkpoint.client(client) for client in clients})
    messages = dict.fromkeys(clients, Message())
    if request.model == "global":
        message = server.global_message()
        if message is None:
            raise SettingsError(f"{prepared.meta.method} has no global model: use --model personal")
        messages = dict.fromkeys(clients, message)
    elif request.phase == "received":
        plan = prepared.plan
        evaluated = range(plan.clients) if plan.eval_all else plan.cohorts[request.round_number - 1]
        # a server rule may compute all messages in one matrix product, so request those of all evaluated clients
        sent = server.downlinks(sorted({*evaluated, *clients}))
        messages = {client: sent[client] for client in clients}
    return host, messages


def _write(source: Source, host: ClientHost, messages: Mapping[int, Message], target: Path) -> list[str]:
    target.mkdir(parents=True, exist_ok=True)
    method, request = source.prepared.meta.method, source.request
    what = "the server's model" if request.model == "global" else "personal models " + (
        "as received" if request.phase == "received" else "after local training"
    )  # fmt: skip
    with TemporaryDirectory(dir=target, prefix=".part") as part:
        folder = Path(part)
        lines = [_export_client(source, host, client, message, folder) for client, message in messages.items()]
        for path in sorted(path for path in folder.iterdir() if path.is_file()):
            write_atomically(target / path.name, path.read_bytes())
    example_path = shlex.quote(str(target / "example.py"))
    return [f"{method} after round {source.checkpoint.round}: {what}", *lines, f"python {example_path}"]


def _export_client(source: Source, host: ClientHost, client: int, message: Message, folder: Path) -> str:
    """Write the files of one client and check the exported model; return a line that describes it."""
    from safetensors.torch import save_file

    prepared, request, test = source.prepared, source.request, host.shards[client].test
    batch_size, is_global = prepared.factory.eval_batch_size, request.model == "global"
    suffix = "" if request.model == prepared.meta.reported_model else f"_{request.model}"
    with host.module_for(request, client, message) as module:
        net = module.plain_net(request.model)
        whole = module if net is None else net.original() if isinstance(net, OwnNet) else net
        kept = "kept_optimizers."
        tensors = snapshot({name: v for name, v in whole.state_dict().items() if not name.startswith(kept)})
        before = count(module.predict_global if is_global else module.predict, test, batch_size)
    path, script = folder / f"client_{client}{suffix}.safetensors", folder / "example.py"
    save_file({k: v.contiguous() for k, v in tensors.items()}, path, _metadata(source, client, net is None))
    shown = test if len(test) else host.shards[client].train
    x, y = (values[:EXAMPLES].cpu().contiguous() for values in (shown.x, shown.y))
    save_file({"x": x, "y": y}, folder / f"examples_{client}.safetensors")
    if not script.exists():  # one script loads the models of all clients
        text = example(source, client, net is None, suffix, shown, before[0], len(test))
        script.write_text(text, encoding="utf-8")
    loaded = runpy.run_path(str(script))["load"](client).to(host.device)
    if host.device.type == "cpu" and module.net.channels_last:  # as on the host: the order of sums depends on it
        loaded.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    predict = loaded.predict_global if net is None and is_global else loaded
    after = count(predict, test, batch_size)  # type: ignore[arg-type]
    result = _compare(source, client, before, after, test)
    return f"{path.name}: {len(tensors)} tensors, {path.stat().st_size / 1000:.1f} kB; {result}"


def _compare(source: Source, client: int, before: tuple[int, float], after: tuple[int, float], test: Examples) -> str:
    """Compare the exported model with the record of the run; return the result in words.

    Args:
        source: what is exported.
        client: the client.
        before: correct predictions and summed loss before the model was written.
        after: the same with the model that was written and loaded.
        test: the test examples of the client.

    Raises:
        RunError: they differ.
    """
    request, total = source.request, len(test)
    record = source.run.counts(request.round_number, Scope(request.model, "test", request.phase)).get(client)
    if not total:
        return "the client has no test examples to check the model with"
    (correct, loss), right = after, f"{after[0]} of {total} test examples right"
    if before[0] != correct or not _close(before[1], loss):
        written = f"{before[0]} before it was written"
        raise RunError(f"client {client}: the exported model gets {right}, but {written}; nothing was exported")
    if record is None:
        return f"{right}; the run has no record of it for round {request.round_number}"
    if (correct, total) == (record.correct, record.total) and _close(loss, record.loss):
        return f"{right}, as the run recorded"
    recorded = f"the run recorded {record.correct} of {record.total}"
    if not source.exact:
        return f"{right}; {recorded}, on a GPU"
    raise RunError(
        f"client {client}: the exported model gets {right}, but {recorded} in round {request.round_number} (loss "
        f"{loss:.6g}, recorded {record.loss:.6g}); nothing was exported. The run used torch "
        f"{source.checkpoint.versions.get('torch')}, this is torch {torch.__version__}"
    )


def _close(one: float, other: float) -> bool:
    """Return whether two losses are equal except for rounding."""
    return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-4) or not (math.isfinite(one) or math.isfinite(other))


def _metadata(source: Source, client: int, whole: bool) -> dict[str, str]:
    """Return the metadata of a client's file; safetensors stores text only."""
    meta, request, data = source.prepared.meta, source.request, source.prepared.dataset
    found = {
        "method": meta.method,
        "client": client,
        "round": request.round_number,
        "model": request.model,
        "phase": request.phase,
        "contents": "client module" if whole else "net",
        "net": meta.model,
        "data": meta.data,
        "partition_hash": meta.partition_hash,
        "seed": meta.seed,
        "classes": data.num_classes,
        "input_shape": list(data.input_shape),
        **({"scale": data.scale} if data.x.dtype.name == "uint8" else {}),
        **({"mean": list(data.mean), "std": list(data.std)} if data.mean is not None and data.std is not None else {}),
    }
    return {key: str(value) for key, value in found.items()}
