"""Shape annotations are checked while tests run; one Ray serves the whole session."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
from jaxtyping import install_import_hook

install_import_hook(["pflsim.fusion", "lightning_modules.losses"], "beartype.beartype")


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """A small Ray with two CPUs and two pretended GPUs, for all tests that need one."""
    import logging
    import os

    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(
            address="local",
            num_cpus=2,
            num_gpus=2,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            logging_level=logging.WARNING,
        )
        yield
        ray.shutdown()
