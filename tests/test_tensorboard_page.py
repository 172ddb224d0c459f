"""What TensorBoard itself makes of a run's event file, in a browser."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.request import urlopen

import pytest
from browsers import opened

from pflsim import cli

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from playwright.sync_api import Browser

LOCAL = ("http://127.0.0.1", "data:", "blob:")
WAIT = 60_000
"""Milliseconds; TensorBoard loads a few MB of scripts."""


@pytest.fixture(scope="module")
def address(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """TensorBoard on two runs; asks for the browser first, for without one there is nothing to serve."""
    root = tmp_path_factory.mktemp("runs")
    for method in ("pfedla", "fedalp"):
        options = [f"method={method}", "executor=inline", "clients=4", "rounds=3", "model.hidden=[8]"]
        assert cli.main([*options, f"run_dir={root / method}"]) == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(root), "--host", "127.0.0.1"]
    with subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.DEVNULL) as server:
        try:
            yield _up(f"http://127.0.0.1:{port}", server)
        finally:
            server.terminate()


def _up(address: str, server: subprocess.Popen[bytes]) -> str:
    """Wait until both runs are served."""
    for _ in range(300):
        assert server.poll() is None, "TensorBoard has ended"
        try:
            with urlopen(f"{address}/data/runs") as answer:
                if len(json.loads(answer.read())) == 2:
                    return address
        except OSError:
            pass
        time.sleep(0.2)
    raise AssertionError("TensorBoard does not answer")


def test_curves_and_histograms(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}/#timeseries", allowed=LOCAL) as seen:
        for tag in ("clients/personal/test/received", "drift/mean", "loss/ce"):
            seen.page.get_by_role("combobox", name="Filter tags (regex)").fill(f"^{tag}$")
            seen.page.locator("card-view").filter(has_text=tag).first.wait_for(timeout=WAIT)


def test_pictures(browser: Browser, address: str) -> None:
    """Weights of pFedLA, Ψ of FedALP, confusion and partition of both are there, and are drawn."""
    with opened(browser, f"{address}/#images", allowed=LOCAL) as seen:
        shown = {"diagnostics/alpha": 1, "diagnostics/psi": 1, "diagnostics/confusion": 2, "partition": 2}
        for tag, runs in shown.items():
            cards = seen.page.locator("tf-image-loader").filter(has_text=tag)
            cards.first.wait_for(timeout=WAIT)
            assert cards.count() == runs, tag
            picture = cards.first.locator("img")
            picture.wait_for(timeout=WAIT)
            picture.scroll_into_view_if_needed()
            assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") > 100


def test_the_table_of_runs(browser: Browser, address: str) -> None:
    with opened(browser, f"{address}/#hparams", allowed=LOCAL) as seen:
        for text in ("fedalp", "pfedla", "accuracy/best_by_validation/mean"):
            seen.page.get_by_text(text, exact=True).first.wait_for(timeout=WAIT)
