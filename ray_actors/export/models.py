"""Models out of a checkpoint: built as an evaluation builds them, written plainly, and held to the run's own counts."""

from __future__ import annotations

import math
import runpy
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from lightning_modules.evaluation import count
from pflsim.analysis.results import read_run
from pflsim.data.federated import Examples
from pflsim.engine.execution import EvalRequest
from pflsim.errors import RunError, SettingsError
from pflsim.messages import Message
from pflsim.params import snapshot
from pflsim.run_folder.checkpoint import BadCheckpoint, choose_checkpoint
from pflsim.run_folder.files import write_atomically
from pflsim.run_folder.metrics import Model, Scope
from pflsim.run_folder.resume import saved_settings
from ray_actors.export.example import Exported, example
from ray_actors.export.source import Source, chosen_clients, find_source
from ray_actors.hosts.client_host import ClientHost
from ray_actors.hosts.server_host import ServerHost

SHOWN = 8
"""How many examples of a client go with its model."""


def export(
    folder: Path, clients: str, round_asked: str, model: Model | None, out: Path | None, data: str | None
) -> list[str]:
    """Write models of a run, and an example that loads them.

    Args:
        folder: the run's.
        clients: a number, several with commas, or `all`.
        round_asked: `best`, `last` or a number.
        model: whose; None: the one that the method is judged by.
        out: where to; None: `export` in the run's folder.
        data: where the data set is now; None: where it was.

    Returns:
        What was done, in lines.

    Raises:
        SettingsError: it cannot be exported; nothing was written.
        RunError: a model does not do what the run recorded of it.
    """
    run, settings = read_run(folder), saved_settings(folder)
    chosen = chosen_clients(clients, settings)
    checkpoint = choose_checkpoint(folder / "checkpoints", round_asked)
    source = find_source(run, settings, checkpoint, model, data)
    try:
        host, messages = _hosts(source, chosen)
    except BadCheckpoint as bad:
        raise SettingsError(f"{checkpoint.path} is damaged: {bad}; see --round") from bad
    target = out or folder / "export"
    try:
        return _write(source, host, messages, target)
    except BaseException:
        with suppress(OSError):  # where nothing was in it before
            target.rmdir()
        raise


def _hosts(source: Source, clients: tuple[int, ...]) -> tuple[ClientHost, dict[int, Message]]:
    """The clients as they were after that round, and what they are judged by."""
    job, request, checkpoint = source.job, source.request, source.checkpoint
    server = ServerHost(job.rule, job.federation, job.factory.threads)
    server.restore(checkpoint.server())
    host = ClientHost(replace(job.factory, stacks=()), job.dataset, job.partition, clients)
    host.states.update({client: checkpoint.client(client) for client in clients})
    messages = dict.fromkeys(clients, Message())
    if request.model == "global":
        message = server.global_message()
        if message is None:
            raise SettingsError(f"{job.meta.method} has no global model; --model personal")
        messages = dict.fromkeys(clients, message)
    elif request.phase == "received":
        plan = job.plan
        others = range(plan.clients) if plan.eval_all else plan.cohorts[request.round_number - 1]
        # to all who were judged together, since a rule may make their messages in one product
        sent = server.downlinks(sorted({*others, *clients}))
        messages = {client: sent[client] for client in clients}
    return host, messages


def _write(source: Source, host: ClientHost, messages: Mapping[int, Message], target: Path) -> list[str]:
    target.mkdir(parents=True, exist_ok=True)
    reported = source.request.model == source.job.meta.reported_model
    with TemporaryDirectory(dir=target, prefix=".part") as part:
        aside, lines = Path(part), list[str]()
        for client, message in messages.items():
            lines.append(_export(source, host, client, message, aside, "" if reported else f"_{source.request.model}"))
        names = sorted(path.name for path in aside.iterdir() if path.is_file())
        for name in names:
            write_atomically(target / name, (aside / name).read_bytes())
    job = source.job
    return [
        f"{job.meta.method} after round {source.checkpoint.round}: {_what(source.request)}",
        *lines,
        f"python {shlex.quote(str(target / 'example.py'))}",
    ]


def _export(source: Source, host: ClientHost, client: int, message: Message, folder: Path, suffix: str) -> str:
    """Write one client's files and hold them to the records; returns a line on it."""
    from safetensors.torch import save_file

    job, request, shown = source.job, source.request, host.shards[client].test
    with host.module_for(request, client, message) as module:
        net = module.plain_net(request.model)
        state = _contiguous((module if net is None else net).state_dict())
        score = module.predict_global if request.model == "global" else module.predict
        own = count(score, shown, job.factory.eval_batch_size)
    exported = Exported(job.factory, request, net is None, client, suffix, job.meta.method)
    save_file(state, folder / f"client_{client}{suffix}.safetensors", metadata=_metadata(source, client, net is None))
    few = shown if len(shown) else host.shards[client].train
    x, y = few.x[:SHOWN].cpu().contiguous(), few.y[:SHOWN].cpu().contiguous()
    save_file({"x": x, "y": y}, folder / f"examples_{client}.safetensors")
    if not (folder / "example.py").exists():  # it is for all of them, and begins with the first
        (folder / "example.py").write_text(example(exported, few, own[0], len(shown)), encoding="utf-8")
    loaded = loaded_by(folder / "example.py", client).to(host.device)
    if host.device.type == "cpu":  # as the host has it, since the order of sums depends on it
        loaded.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    predict = loaded.predict_global if net is None and request.model == "global" else loaded
    found = count(predict, shown, job.factory.eval_batch_size)  # type: ignore[arg-type]
    said = _verdict(source, client, [own, found], shown)
    size = (folder / f"client_{client}{suffix}.safetensors").stat().st_size
    return f"client_{client}{suffix}.safetensors: {len(state)} tensors, {size / 1000:.1f} kB; {said}"


def loaded_by(path: Path, client: int) -> nn.Module:
    """What an example's own `load` makes of a client's file."""
    return runpy.run_path(str(path))["load"](client)


def _verdict(source: Source, client: int, found: Sequence[tuple[int, float]], examples: Examples) -> str:
    """What the exported model gets right, beside what the run has recorded.

    Args:
        source: what is exported.
        client: whose.
        found: correct and summed loss of the model before and after it was written and loaded.
        examples: on these.

    Raises:
        RunError: it is not the same.
    """
    request, n = source.request, len(examples)
    record = source.run.counts(request.round_number, Scope(request.model, "test", request.phase)).get(client)
    right = f"{' or '.join(map(str, sorted({correct for correct, _ in found})))} of {n} test examples right"
    if not n:
        return "the client has no test examples to hold it to"
    (before, loss_before), (after, loss_after) = found
    if before != after or not _alike(loss_before, loss_after):
        raise RunError(f"client {client}: what was written is not what the run has ({right}); nothing is left of it")
    if record is None:
        return f"{right}; the run has no record of it for round {request.round_number}"
    if (after, n) == (record.correct, record.total) and _alike(loss_after, record.loss):
        return f"{right}, as the run recorded"
    recorded = f"the run recorded {record.correct} of {record.total}"
    if not source.exact:
        return f"{right}; {recorded}, on a GPU"
    raise RunError(
        f"client {client}: the exported model gets {right}, but {recorded} in round {request.round_number} (loss "
        f"{loss_after:.6g}, recorded {record.loss:.6g}); nothing was written. The run was saved with torch "
        f"{source.checkpoint.meta.versions.get('torch')}, this is torch {torch.__version__}"
    )


def _alike(one: float, other: float) -> bool:
    """Whether two losses differ by rounding at most, as those of models do that are the same."""
    return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-4) or not (math.isfinite(one) or math.isfinite(other))


def _metadata(source: Source, client: int, whole: bool) -> dict[str, str]:
    """What the file says of itself; safetensors takes text only."""
    job, request, data = source.job, source.request, source.job.dataset
    found = {
        "method": job.meta.method,
        "client": client,
        "round": request.round_number,
        "model": request.model,
        "phase": request.phase,
        "contents": "client module" if whole else "net",
        "net": job.meta.model,
        "data": job.meta.data,
        "partition_hash": job.meta.partition_hash,
        "seed": job.meta.seed,
        "classes": data.num_classes,
        "input_shape": list(data.input_shape),
        **({"scale": data.scale} if data.x.dtype.name == "uint8" else {}),
        **({"mean": list(data.mean), "std": list(data.std)} if data.mean is not None and data.std is not None else {}),
    }
    return {key: str(value) for key, value in found.items()}


def _contiguous(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU, row by row in memory."""
    return {key: value.contiguous() for key, value in snapshot(state).items()}


def _what(request: EvalRequest) -> str:
    if request.model == "global":
        return "the server's model"
    return "personal models " + ("as received" if request.phase == "received" else "after local training")
