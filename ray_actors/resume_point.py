"""Where a run resumes: its newest usable checkpoint."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from lightning_modules.prepare import PreparedRun
from pflsim.config.settings import Settings
from pflsim.errors import SettingsError
from pflsim.params import load_state
from pflsim.records.checkpoint_read import (
    BadCheckpoint,
    Checkpoint,
    check_header,
    fitting,
    from_containers,
    newest_checkpoint,
)
from pflsim.records.checkpoint_write import remove_parts, to_bytes, to_containers
from pflsim.records.folder import is_complete
from pflsim.records.history import RoundMetrics, stalled_since, validation_scores
from pflsim.records.per_client import complete_rounds
from pflsim.records.saved_settings import fixed_settings, saved_settings


def resume_point(prepared: PreparedRun, folder: Path, report: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest complete checkpoint whose rounds are in the records; None: the run starts from the beginning.

    Args:
        prepared: the run.
        folder: its run folder; nothing in it is changed.
        report: called with a line for each difference and each damaged file.

    Raises:
        SettingsError: the checkpoint is of another run, the number of rounds or `stop` cannot change, or the records
            of all checkpoints' rounds are lost.
    """
    history, checkpoints = complete_rounds(folder) if has_records(folder) else [], folder / "checkpoints"
    until, unused, planned = history[-1].round if history else -1, list[str](), prepared.plan.rounds

    def check(found: Checkpoint) -> None:
        nonlocal planned
        own = {"method": prepared.meta.method, **prepared.plan.header}
        saved, defaults = found.header.get("settings") or {}, fixed_settings(Settings())
        planned = saved.get("rounds", prepared.plan.rounds)
        # without settings that are newer than the checkpoint and have their default
        known = {k: v for k, v in own["settings"].items() if k in saved or k not in defaults or v != defaults[k]}
        check_header(found, {**own, "settings": {**known, "rounds": planned}}, report)
        _check_states(prepared, found)

    found = newest_checkpoint(checkpoints, unused.append, until, check)
    for line in unused:
        report(line)
    if found is not None:
        if prepared.settings.stop != saved_settings(folder).stop:
            _check_patience(prepared, [line for line in history if line.round <= found.round])
        if planned != prepared.plan.rounds:
            _check_rounds(prepared, found, planned, report)
        return found
    if any(checkpoints.glob("round_*")) and newest_checkpoint(checkpoints, lambda line: None):
        raise SettingsError(
            f"{folder} has no checkpoint that fits its model, metrics.jsonl and per_client.csv: {unused[0]}; restore "
            f"these files, or remove {checkpoints} to start from the beginning"
        )
    if is_complete(folder, max(until, 0)):
        raise SettingsError(f"{folder} has no usable checkpoint, so it cannot be extended: start a new run")
    report(f"{folder} has no checkpoint to resume from: the run starts from the beginning")
    return None


def _check_states(prepared: PreparedRun, found: Checkpoint) -> None:
    """Check that the states in a checkpoint fit the server rule and every client's module.

    Raises:
        BadCheckpoint: they do not.
        SettingsError: the server's state is of another version of the method.
    """
    rule, factory = prepared.rule, prepared.factory
    modules = [factory.build(variant) for variant in range(len(factory.models))]
    state = from_containers(type(rule.init(prepared.federation)), found.server())
    with fitting(found.path):
        states = found.clients()
        for client in range(prepared.plan.clients):
            saved, own = next(states, (None, {}))
            if saved != client:
                raise BadCheckpoint(f"{found.path} has no state of client {client}")
            load_state(modules[factory.variant_of(client)], own)
        for client, module in enumerate(modules[: prepared.plan.clients]):
            module.receive(rule.downlink(state, client))


def _check_patience(prepared: PreparedRun, history: Sequence[RoundMetrics]) -> None:
    """Check that a run with another patience would not have ended in the rounds that are done.

    Raises:
        SettingsError: it would have.
    """
    patience = prepared.settings.stop.patience
    best = stalled_since(validation_scores(history, prepared.meta.reported), patience)
    if best is not None:
        raise SettingsError(
            f"stop.patience={patience} would have ended the run before, because no better validation accuracy than "
            f"that of round {best} followed in time; give a larger number, or null"
        )


def _check_rounds(prepared: PreparedRun, found: Checkpoint, planned: int, report: Callable[[str], None]) -> None:
    """Check that a run with another number of rounds would have done the same rounds so far.

    Args:
        prepared: the run with the new number.
        found: where it resumes.
        planned: the number with which the checkpoint was saved.
        report: called with a line if the last planned round is evaluated only because it was the last one.

    Raises:
        SettingsError: these rounds are done already, or the method's schedule depends on the number of rounds.
    """
    method, rule, rounds = prepared.meta.method, prepared.rule, prepared.plan.rounds
    if rounds <= found.round:
        raise SettingsError(f"rounds={rounds}: {found.round} rounds are done; expected more")
    before, now = (to_containers(rule.init(replace(prepared.federation, rounds=n))) for n in (planned, rounds))
    differing = [key for key in now if to_bytes(before[key]) != to_bytes(now[key])]
    factory = prepared.factory
    training = (replace(factory.training, rounds=n) for n in (planned, rounds))
    first, second = (replace(factory, training=each).build().decided_by_rounds() for each in training)
    if first != second:
        differing.append(f"of clients {first} and {second}")
    for key, value in (("lr_schedule", "cosine"), ("participation.last", "all")):
        if attrgetter(key)(prepared.settings) == value:
            differing.append(f"{key}={value}")
    for t in range(1, found.round + 1):
        if any(asked(t, planned) != asked(t, rounds) for asked in (rule.full_participation, rule.surveys)):
            differing.append(f"participants of round {t}")
    if differing:
        raise SettingsError(
            f"rounds={rounds}: the schedule of {method} depends on the number of rounds, so the rounds that are "
            f"done would differ ({', '.join(differing)}); start a new run"
        )
    if found.round == planned and planned % prepared.settings.eval.every:
        report(f"round {planned} stays evaluated, which it would not be with rounds={rounds} from the start")


def has_records(folder: Path) -> bool:
    """Return whether the folder has the record of a round."""
    lines = folder / "metrics.jsonl"
    return lines.exists() and lines.stat().st_size > 0


def remove_leftovers(folder: Path) -> None:
    """Remove what interrupted checkpoints and, in a run without a finished round, its records have left."""
    remove_parts(folder / "checkpoints")
    if not has_records(folder):
        for path in (folder / "metrics.jsonl", folder / "per_client.csv"):
            path.unlink(missing_ok=True)
        for path in folder.glob("*tfevents*"):
            path.unlink()
