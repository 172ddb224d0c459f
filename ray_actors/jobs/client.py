"""The jobs of a cluster over HTTP, with whatever goes wrong said in words."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from pflsim.errors import RunError, SettingsError

DEFAULT = "http://127.0.0.1:8265"
VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
TIMEOUTS = 10, 300
"""Seconds to connect, and to wait for a part of an answer. Ray has none."""
KIND, RUN, FETCH = "pflsim", "run", "fetch"
"""The key in a job's metadata by which ours are told from others, and its values."""
OVER = ("SUCCEEDED", "FAILED", "STOPPED")


class Client(Protocol):
    """What is used of Ray's JobSubmissionClient."""

    def submit_job(self, **settings: Any) -> str: ...  # noqa: D102

    def stop_job(self, job_id: str) -> bool: ...  # noqa: D102

    def delete_job(self, job_id: str) -> bool: ...  # noqa: D102

    def get_job_info(self, job_id: str) -> Any: ...  # noqa: D102

    def list_jobs(self) -> list[Any]: ...  # noqa: D102

    def get_job_logs(self, job_id: str) -> str: ...  # noqa: D102

    def tail_job_logs(self, job_id: str) -> AsyncIterator[str]: ...  # noqa: D102


class Cluster:
    """A cluster's jobs.

    Args:
        client: Ray's, or the like.
        address: where it is, as messages name it.
        given: whether the address has to be given in commands that are told to the user.
    """

    def __init__(self, client: Client, address: str = DEFAULT, given: bool = False):
        self._client, self.address, self._given = client, address, given

    def submit(self, **settings: Any) -> str:
        """Upload the working directory where it is not there yet, and start a job; its id."""
        with self._words("the job was not started"):
            return self._client.submit_job(**settings)

    def stop(self, job: str) -> bool:
        """Ask a job to end; whether there was anything to end."""
        with self._words("it was not stopped", job):
            return self._client.stop_job(job)

    def delete(self, job: str) -> None:
        """Forget a job that is over."""
        with self._words("it was not deleted", job):
            self._client.delete_job(job)

    def info(self, job: str) -> Any:
        """Its JobDetails."""
        with self._words("nothing is known of it", job):
            return self._client.get_job_info(job)

    def jobs(self) -> list[Any]:
        """The details of all jobs."""
        with self._words("the jobs cannot be listed"):
            return self._client.list_jobs()

    def log(self, job: str) -> str:
        """All that a job has printed."""
        with self._words("its log cannot be read", job):
            return self._client.get_job_logs(job)

    async def tail(self, job: str) -> AsyncIterator[str]:
        """What a job has printed from its beginning, and prints, until it is over."""
        with self._words("its log cannot be read", job):
            async for text in self._client.tail_job_logs(job):
                yield text

    def command(self, words: str) -> str:
        """A command for the user to type."""
        return f"python launch.py {words}{f' --address {self.address}' if self._given else ''}"

    @contextmanager
    def _words(self, what: str, job: str | None = None) -> Iterator[None]:
        try:
            yield
        except (RunError, SettingsError):
            raise
        except Exception as error:
            if not _is_theirs(error):
                raise
            text, name = _last_line(str(error)), f"{job}: " if job else ""
            if job and "status code 404" in str(error):
                raise SettingsError(f"{job}: {self.address} knows no such job; see {self.command('status')}") from error
            if "already exists" in str(error):
                raise SettingsError("there is a job of that id already: give another --id, or none") from error
            if isinstance(error, RuntimeError) and "status code" in str(error):
                raise RunError(f"{name}{what}: {self.address} says: {text}") from error
            raise RunError(f"{name}{what}: {self.address} does not answer ({text})") from error


def connect(asked: str | None) -> Cluster:
    """The cluster at an address, that of the environment, or one on this machine.

    Raises:
        SettingsError: this is no address of a dashboard.
        RunError: nothing, or something else, answers there.
    """
    address = checked_address(asked)
    with _without(VARIABLES):  # Ray would take them before the address that is given
        client = _connected(address)
    import ray

    theirs = getattr(client, "_server_ray_version", None)
    if theirs and theirs != ray.__version__:
        print(
            f"warning: the cluster has Ray {theirs}, here is {ray.__version__}; jobs run with theirs", file=sys.stderr
        )
    return Cluster(client, address, given=asked is not None)


def checked_address(asked: str | None) -> str:
    """The address to connect to.

    Raises:
        SettingsError: it is an address of another kind.
    """
    named = [value for name in VARIABLES if (value := os.environ.get(name, "")).startswith(("http://", "https://"))]
    address = asked if asked is not None else (named or [DEFAULT])[0]
    expected = "jobs go to the cluster's dashboard: --address http://HOST:8265"
    if address.startswith("ray://"):
        raise SettingsError(f"--address {address}: ray:// is for Ray Client; {expected}")
    if not address.startswith(("http://", "https://")):
        other = "that is what nodes and drivers join a cluster by; " if address == "auto" or ":" in address else ""
        raise SettingsError(f"--address {address}: {other}{expected}")
    try:
        parts = urlsplit(address)
        good = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good:
        raise SettingsError(f"--address {address}: this is no address; {expected}")
    return address.rstrip("/")


def _connected(address: str) -> Client:
    import requests
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    class Impatient(JobSubmissionClient):
        def _do_request(self, *arguments: Any, **settings: Any) -> requests.Response:
            return super()._do_request(*arguments, **{"timeout": TIMEOUTS, **settings})

    for name in ("modules.job.sdk", "modules.dashboard_sdk"):  # what they say is said here, in fewer words
        logging.getLogger(f"ray.dashboard.{name}").setLevel(logging.WARNING)
    try:
        return cast(Client, Impatient(address))
    except AuthenticationError as error:
        raise RunError(f"{address} asks for a token: {_last_line(str(error))}") from error
    except requests.Timeout as error:
        raise RunError(f"nothing answers at {address} within {TIMEOUTS[0]} s: check --address") from error
    except ConnectionError as error:
        raise RunError(
            f"nothing answers at {address}: is the cluster up, with its dashboard, and is the port forwarded? "
            "Otherwise give --address http://HOST:8265"
        ) from error
    except (requests.RequestException, RuntimeError, ValueError, KeyError) as error:
        raise RunError(f"what answers at {address} is no dashboard of Ray ({_last_line(str(error))})") from error


def _is_theirs(error: Exception) -> bool:
    """Whether it comes from the connection or the cluster, and not from a mistake of ours."""
    origin = type(error).__module__.partition(".")[0]
    return isinstance(error, OSError | RuntimeError) or origin in ("requests", "aiohttp", "urllib3", "ray")


def _last_line(text: str) -> str:
    """Of a traceback, which a dashboard may send, the line that says what it was."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" .")]
    return lines[-1].rstrip(".") if lines else "no reason given"


@contextmanager
def _without(names: tuple[str, ...]) -> Iterator[None]:
    """The environment without some of its variables."""
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
