"""What the calling program has set changes no result, and a run changes nothing of it."""

import importlib
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from support import settings_of, slow_except
from torch import nn

import pflsim
from lightning_modules.hosts.client_host import ClientHost
from lightning_modules.hosts.devices import torch_threads
from pflsim import cli
from pflsim.config.compose import CONFIGS
from pflsim.errors import SettingsError
from ray_actors.run import Runner


class Drawing(nn.Module):
    """Draws from all global generators, when it is built and in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 8, 3)
        self.layer = nn.Linear(288, 10)
        with torch.no_grad():
            self.layer.bias.fill_(random.random() + np.random.random())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(nn.functional.dropout(self.convolution(x).flatten(1), 0.5, self.training))


def run(folder: Path, **settings: Any) -> str:
    """Run, and return what was recorded of the clients."""
    given = {"data": "digits", "method": "fedavg", "model": Drawing, "clients": 2, "rounds": 1, **settings}
    given = {"optimizer": "adam", "lockstep": False, **given}  # a step of an optimiser of PyTorch
    made = pflsim.run(**given, executor="inline", progress="none", run_dir=str(folder))
    return (made.folder / "per_client.csv").read_text().replace(str(folder), "")


@contextmanager
def put(get: Callable[[], Any], set_: Callable[[Any], Any], value: Any) -> Iterator[None]:
    """Set something inside the block, and check at its end that it is still set."""
    before = get()
    set_(value)
    try:
        yield
        assert get() == value
    finally:
        set_(before)


@contextmanager
def moved_generators() -> Iterator[None]:
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    yield
    found = random.random(), np.random.random(), torch.rand(()).item()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    assert found == (random.random(), np.random.random(), torch.rand(()).item())


@contextmanager
def hooked_modules() -> Iterator[None]:
    """Hooks of all modules and optimisers, which are still there at the end."""
    optimizer = importlib.import_module("torch.optim.optimizer")
    forward = nn.modules.module.register_module_forward_hook(lambda module, given, result: result * 2)
    backward = nn.modules.module.register_module_full_backward_hook(lambda module, inputs, outputs: None)
    step = optimizer.register_optimizer_step_pre_hook(lambda optimiser, *_: optimiser.param_groups[0].update(lr=9.0))
    yield
    assert nn.Identity()(torch.ones(())) == 2 and optimizer._global_optimizer_pre_hooks
    forward.remove(), backward.remove(), step.remove()
    assert nn.Identity()(torch.ones(())) == 1


def attribute(owner: Any, name: str, value: Any) -> Any:
    return put(lambda: getattr(owner, name), lambda to: setattr(owner, name, to), value)


def default_device(device: torch.device) -> None:
    """Set the default device; without `None` for the CPU, PyTorch would keep a context of it."""
    torch.set_default_device(None if device.type == "cpu" else device)


SET: dict[str, Callable[[], Any]] = {
    "dtype": lambda: put(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "precision": lambda: put(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "convolutions": lambda: attribute(torch.backends.mkldnn.conv, "fp32_precision", "bf16"),
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "anomalies": lambda: torch.autograd.set_detect_anomaly(True),
    "deterministic": lambda: put(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "device": lambda: put(torch.get_default_device, default_device, torch.device("meta")),
    "generators": moved_generators,
    "hooks": hooked_modules,
    "TeX": lambda: mpl.rc_context({"text.usetex": True}),
    "Hydra": lambda: initialize_config_dir(str(CONFIGS), version_base="1.2"),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run(tmp_path_factory.mktemp("runs") / "alone")


@pytest.mark.parametrize("name", slow_except(["dtype", "generators", "hooks"], SET))
def test_results_do_not_depend_on_it(name: str, expected: str, tmp_path: Path) -> None:
    with SET[name]():
        found = run(tmp_path / "surrounded")
        if name == "Hydra":
            assert compose("config") and GlobalHydra.instance().is_initialized()
    assert found == expected


def test_a_run_in_the_context_of_another_device_is_refused(expected: str, tmp_path: Path) -> None:
    with torch.device("meta"), pytest.raises(SettingsError, match="meta"):
        run(tmp_path / "refused")
    assert run(tmp_path / "after") == expected and torch.empty(0).device.type == "cpu"


@pytest.mark.slow
def test_a_second_run_in_another_thread_is_refused(tmp_path: Path) -> None:
    refused: list[BaseException] = []

    def second() -> None:
        try:
            run(tmp_path / "second")
        except SettingsError as error:
            refused.append(error)

    def start_second(_: Any) -> None:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    run(tmp_path / "first", callbacks=[start_second])
    assert len(refused) == 1 and "thread" in str(refused[0])
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.slow
def test_the_driver_uses_the_threads_of_the_placement(
    threads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen, run_groups = set[int](), ClientHost.run_groups

    def recorded(*arguments: Any) -> Any:
        seen.add(torch.get_num_threads())
        return run_groups(*arguments)

    monkeypatch.setattr(ClientHost, "run_groups", recorded)
    overrides = ["executor=inline", "rounds=1", "progress=none", f"placement.threads={threads}"]
    with torch_threads(3), Runner() as runner:
        runner.run(settings_of(*overrides, f"run_dir={tmp_path / 'run'}"))
        assert torch.get_num_threads() == 3
    assert seen == {threads}


@pytest.mark.parametrize(("given", "found"), [(None, "passive"), ("active", "active")])
def test_threads_sleep_while_they_wait(given: str | None, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that spin keep each other from working where others need the CPUs, too."""
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    assert cli.run(["--help"]) == 0 and os.environ["OMP_WAIT_POLICY"] == found
