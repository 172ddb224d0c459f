"""What becomes of a failure: another try, a round without the client, or the end of the run."""

from __future__ import annotations

from collections.abc import Iterable

from pflsim.config.on_client_error import OnError
from pflsim.errors import ClientError
from pflsim.run_folder.journal import Journal
from ray_actors.hosts.retries import Failure, Reply


class FailurePolicy:
    """Applies the rules of `on_client_error` and `on_nonfinite`, and tells the journal.

    Args:
        on_error: the first.
        on_nonfinite: the second: abort, drop or keep.
        journal: where it is told.
    """

    def __init__(self, on_error: OnError, on_nonfinite: str, journal: Journal):
        self.on_error, self.on_nonfinite, self.journal = on_error, on_nonfinite, journal

    def again(self, failure: Failure, tries: int, before: Failure | None = None) -> tuple[int, ...]:
        """Who of the unit shall work once more; none: the round goes on without them.

        Args:
            failure: what happened.
            tries: how often the unit was tried again already.
            before: what happened then. The same error twice is no accident, so there is no third try.

        Raises:
            ClientError: the run ends.
        """
        error, suspects = failure.error, failure.error.suspects
        said = f"{error} [{failure.where}]" if failure.where else str(error)
        if failure.kind == "nonfinite":
            if self.on_nonfinite == "abort":
                raise _ended(failure, "on_nonfinite=drop goes on without it")
            self.journal.say(f"{said}; left out of this round")
            self.journal.fault(suspects, "nonfinite")
            return ()
        if self.on_error.rule == "drop":
            self.journal.failure(f"{said}; the round goes on without {_clients(suspects)}", failure.trace)
            self.journal.fault(suspects, "error")
            return tuple(client for client in failure.unit if client not in suspects)
        repeated = failure.kind == "error" and before is not None and before.error.reason == error.reason
        if tries < self.on_error.tries and not repeated:
            self.journal.failure(f"{said}; another try, {tries + 1} of {self.on_error.tries}", failure.trace)
            return failure.unit
        why = ", the same error twice" if repeated else ""
        self.journal.failure(f"{said}; the run ends here{why}", failure.trace)
        raise _ended(failure, "on_client_error=drop goes on without it")

    def kept(self, replies: Iterable[Reply]) -> None:
        """Tell of what is not finite and was let through, all of it in one line."""
        found = {r.report.client: (r.report, r.nonfinite) for r in replies if r.nonfinite}
        self.tell_kept({client: words for client, (_, words) in found.items()})

    def tell_kept(self, found: dict[int, str]) -> None:
        """The same, of the words by client."""
        if found:
            first = min(found)
            self.journal.say(
                f"values that are not finite were fused (on_nonfinite=keep): {_clients(found)}; client {first}: "
                f"{found[first]}"
            )
            self.journal.fault(found, "nonfinite")


def _clients(clients: Iterable[int]) -> str:
    ids = sorted(clients)
    return f"client{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"


def _ended(failure: Failure, advice: str) -> ClientError:
    """The error with which the run ends: where, and what could be done."""
    error = failure.error
    reason = f"{error.reason} [{failure.where}]" if failure.where else error.reason
    return ClientError(error.client, error.round_number, error.phase, f"{reason} ({advice})", error.suspects)
