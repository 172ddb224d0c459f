"""Shape annotations are checked while tests run; one Ray serves the whole session."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from jaxtyping import install_import_hook

if TYPE_CHECKING:
    from ray_actors.pool import Pool

install_import_hook(["pflsim.fusion", "lightning_modules.losses"], "beartype.beartype")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Actors on a small Ray with pretended CPUs and GPUs, for all tests that need one; used again and again."""
    import logging
    import os

    import ray

    from ray_actors.pool import Pool

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (here, os.environ.get("PYTHONPATH")) if p)  # for `support`
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(
            address="local",
            _node_ip_address="127.0.0.1",
            num_cpus=8,
            num_gpus=2,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            logging_level=logging.WARNING,
        )
        made = Pool()
        yield made
        made.close()
        ray.shutdown()
