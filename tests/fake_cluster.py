"""A cluster's jobs without a cluster: Ray packs and unpacks the working directory, and a shell runs the command."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray._private.ray_constants import get_runtime_env_default_excludes
from ray._private.runtime_env.packaging import create_package, get_uri_for_directory, unzip_package

NODE = "node-1"


class FakeClient:
    """In the place of Ray's JobSubmissionClient; jobs run when they are submitted, to their end.

    Args:
        folder: for unpacked working directories and for the home of the user there.
        runs: whether commands are run.
    """

    def __init__(self, folder: Path, runs: bool = True):
        self.folder, self.runs = folder, runs
        self.home = folder / "home of the user"
        self.home.mkdir(parents=True)
        self.submitted: list[dict[str, Any]] = []
        self.uris: list[str] = []
        self.details: dict[str, Any] = {}
        self.logs: dict[str, str] = {}
        self.stopped: list[str] = []
        self.deleted: list[str] = []

    def add(self, job: str, status: str = "RUNNING", log: str = "", **more: Any) -> SimpleNamespace:
        """A job that is there."""
        known = {"submission_id": job, "status": status, "message": None, "start_time": 1_700_000_000_000,
                 "end_time": None, "metadata": {}, "driver_node_id": NODE, "driver_exit_code": None,
                 "driver_agent_http_address": "http://10.0.0.1:52365"}  # fmt: skip
        self.details[job], self.logs[job] = SimpleNamespace(**{**known, **more}), log
        return self.details[job]

    def submit_job(self, **settings: Any) -> str:
        job = settings["submission_id"]
        if job in self.details:
            raise RuntimeError(f"Request failed with status code 500: ValueError: {job} already exists.")
        self.submitted.append(settings)
        here = self.folder / job
        here.mkdir()
        if environment := settings.get("runtime_env"):
            self._unpack(environment["working_dir"], here)
        code, printed = self._run(settings["entrypoint"], here) if self.runs else (None, "")
        status = "PENDING" if code is None else "FAILED" if code else "SUCCEEDED"
        log = f"Running entrypoint for job {job}: {settings['entrypoint']}\n{printed}"
        self.add(job, status, log, metadata=settings.get("metadata"), driver_exit_code=code)
        return job

    def _unpack(self, working_dir: str, here: Path) -> None:
        gitignore = os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE") != "1"
        excluded = get_runtime_env_default_excludes()
        self.uris.append(get_uri_for_directory(working_dir, gitignore, excluded))
        archive = here.with_suffix(".zip")
        create_package(working_dir, archive, gitignore, excludes=excluded)
        unzip_package(str(archive), str(here), False, False, logging.getLogger())

    def _run(self, command: str, here: Path) -> tuple[int, str]:
        environment = {"HOME": str(self.home), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(command, shell=True, cwd=here, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def _known(self, values: Mapping[str, Any], job: str) -> Any:
        if job not in values:
            raise RuntimeError(f"Request failed with status code 404: Job {job} does not exist.")
        return values[job]

    def stop_job(self, job_id: str) -> bool:
        self._known(self.details, job_id)
        self.stopped.append(job_id)
        return True

    def delete_job(self, job_id: str) -> bool:
        self._known(self.details, job_id)
        self.deleted.append(job_id)
        return True

    def get_job_info(self, job_id: str) -> Any:
        return self._known(self.details, job_id)

    def list_jobs(self) -> list[Any]:
        return [*self.details.values()]

    def get_job_logs(self, job_id: str) -> str:
        return self._known(self.logs, job_id)
