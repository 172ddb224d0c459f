"""Errors that the command line prints without a traceback."""

import logging
import site
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

OURS = [Path(__file__).parents[1] / package for package in ("pflsim", "lightning_modules", "ray_actors")]
OTHERS = (*OURS, *map(Path, site.getsitepackages()), Path(logging.__file__).parents[1])
"""Folders of this project, of installed packages and of the standard library."""
GPU_MEMORY_ADVICE = (
    "lower placement.actors_per_gpu so that each actor has a larger share of a GPU; if it is 1, lower "
    "lockstep_clients, batch_size or eval.batch_size"
)


class SettingsError(ValueError):
    """Raised before any actor starts when settings are invalid or contradict each other; exit status 2."""


class RunError(RuntimeError):
    """Raised when a run fails; exit status 1."""


def called(client: int, names: Sequence[str]) -> str:
    """Return a client's id, and its name if the clients have names, for a message."""
    return f"client {client}{f' ({names[client]})' if names else ''}"


class ClientError(RunError):
    """Raised when a client fails.

    Args:
        client: its id.
        round_number: from 1; 0 is the initial round.
        phase: what the client was doing, e.g. "local training".
        reason: the error as text.
        suspects: the clients that trained together, if the failure cannot be attributed to one of them.
        names: of all clients, if they have names.
    """

    def __init__(
        self,
        client: int,
        round_number: int,
        phase: str,
        reason: str,
        suspects: tuple[int, ...] = (),
        names: Sequence[str] = (),
    ):
        super().__init__(f"{called(client, names)} failed in round {round_number} ({phase}): {reason}")
        self.client, self.round_number, self.phase, self.reason = client, round_number, phase, reason
        self.suspects = suspects or (client,)

    def __reduce__(self):
        """Keep the attributes when the error is pickled."""
        return type(self), (self.client, self.round_number, self.phase, self.reason, self.suspects)


class DivergenceError(ClientError):
    """Raised when a client's loss or message is not finite; resuming the run gives the same values again."""


class ServerError(RunError):
    """Raised when the server rule or its actor fails."""


@contextmanager
def own_errors(what: str) -> Iterator[None]:
    """Raise an error of a user's code inside the block as a `SettingsError` with its line; others are unchanged."""
    try:
        yield
    except (SettingsError, RunError):
        raise
    except Exception as error:
        place = place_of(error)
        if not place and not isinstance(error, SyntaxError):
            raise
        raise SettingsError(f"{what} fails: {type(error).__name__}: {error}{place}") from error


@contextmanager
def reading(what: object, expected: str) -> Iterator[None]:
    """Raise any error inside the block, such as those of libraries about invalid bytes, as a `SettingsError`.

    Args:
        what: the file or object, for the message.
        expected: what it should be, for the message.
    """
    try:
        yield
    except SettingsError:
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(": ")
        raise SettingsError(f"{what} cannot be read ({reason}); expected {expected}") from error


def in_one_line(error: BaseException) -> str:
    """Return the type of an error, the first line of its text, and the line of a user's code where it was raised."""
    first, _, more = str(error).strip().partition("\n")
    first += f" {more.strip().partition(chr(10))[0]}" if first.endswith(":") else ""
    return f"{type(error).__name__}: {first}{place_of(error)}"


def place_of(error: BaseException) -> str:
    """Return the last line of a user's code in the traceback, as ` (FILE, line N)`; empty if there is none."""
    while error.__cause__:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename[:1] != "<" and not any(map(Path(f.filename).is_relative_to, OTHERS))]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


@contextmanager
def client_errors(client: int, round_number: int, phase: str, suspects: tuple[int, ...] = ()) -> Iterator[None]:
    """Raise an error inside the block as a `ClientError` with these arguments."""
    try:
        yield
    except Exception as error:
        raise ClientError(client, round_number, phase, in_words(error), suspects) from error


def in_words(error: Exception) -> str:
    """Return an error as one line. If GPU memory ran out, the advice is this project's instead of torch's."""
    if type(error).__name__ != "OutOfMemoryError" or not type(error).__module__.startswith("torch"):
        return f"{type(error).__name__}: {error}"
    wanted = [part for part in str(error).split(". ") if part.startswith("Tried to allocate")]
    return f"out of memory on the GPU{''.join(f' (t{part[1:]})' for part in wanted)}: {GPU_MEMORY_ADVICE}"
