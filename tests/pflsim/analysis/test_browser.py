"""Pages as a browser shows them, a headless Chromium."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from made_runs import make_run

from pflsim.cli import main

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOW = "apt-get install chromium, or set PFLSIM_CHROMIUM to the program"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The Chromium of this machine, headless; without one the test is skipped, which says how to get it."""
    program = os.environ.get("PFLSIM_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no Chromium: {HOW}")
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -e '.[dev]'")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@dataclass
class Seen:
    """A page that is open, and what it has said and asked for."""

    page: Page
    said: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @property
    def too_wide(self) -> int:
        """By how many pixels the page is wider than its window."""
        return self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")

    @property
    def paper(self) -> str:
        """The colour behind the text."""
        return self.page.evaluate("getComputedStyle(document.body).backgroundColor")


@contextmanager
def opened(browser: Browser, url: str, *, width: int = 1400) -> Iterator[Seen]:
    """Open a page; whatever it asks for outside the machine is refused and noted."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="light")
    seen = Seen(page)

    def decide(route: Route) -> None:
        if route.request.url.startswith(("file:", "data:")):
            route.continue_()
        else:
            seen.refused.append(route.request.url)
            route.abort()

    page.route("**/*", decide)
    page.on("console", lambda message: seen.said.append(message.text))
    page.on("pageerror", lambda error: seen.said.append(str(error)))
    page.goto(url)
    yield seen
    page.close()


pytestmark = pytest.mark.slow

LONG = "a_method_with_a_name_that_is_longer_than_any_telephone_is_wide_and_has_no_place_to_break"
METHODS = ("local", "fedavg", "fedrep", "ditto", LONG)


def counts_of(method: str, seed: int) -> list[list[tuple[int, int]]]:
    rng = np.random.default_rng([seed, METHODS.index(method)])
    low = 8 + 2 * METHODS.index(method)
    return [[(int(n), 20) for n in rng.integers(low - 5, low, 10)] for _ in range(5)]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a report about five methods with two seeds, one of a very long name, and a run that stopped."""
    root = tmp_path_factory.mktemp("runs")
    for method, seed in product(METHODS, (0, 1)):
        val = [[(n, 10)] * 10 for n in range(5)]  # the last round is the best
        folder = root / f"{method}{seed}"
        sent = 0 if method == "local" else 5000
        make_run(folder, counts_of(method, seed), val=val, method=method, seed=seed, up=sent, down=sent)
        about = {"hash": f"{seed:064d}", "data": "digits", "partition": "iid", "clients": 10, "classes": 4}
        held = [dict.fromkeys(("train", "val", "test"), [n % m for m in range(1, 5)]) for n in range(10)]
        (folder / "partition.json").write_text(json.dumps({**about, "class_counts": held}))
    make_run(root / "stopped", counts_of("fedavg", 2), method="fedavg", seed=2, rounds=9, complete=False)
    out = root / "report.html"
    assert main(["report", str(root), "--out", str(out)]) == 0
    return Path(out).as_uri()


@pytest.mark.parametrize("width", [360, 400, 800, 1600])
def test_a_report_fits_the_window_and_asks_for_nothing(browser: Browser, report: str, width: int) -> None:
    with opened(browser, report, width=width) as seen:
        assert seen.too_wide <= 0
        assert not seen.refused and not seen.said
        assert seen.page.locator("h1").is_visible() and seen.page.locator(".forest svg").first.is_visible()
        wide = "found => found.filter(x => x.getBoundingClientRect().right > innerWidth + 1).map(x => x.outerHTML)"
        assert seen.page.eval_on_selector_all("figure, p, dl, h2, pre, .scroll, .forest, li", wide) == []


def test_the_text_alone_has_every_figure(browser: Browser, report: str) -> None:
    """Without charts and with all folds open."""
    with opened(browser, report) as seen:
        seen.page.evaluate("document.querySelectorAll('svg').forEach(x => x.remove())")
        seen.page.evaluate("document.querySelectorAll('details').forEach(x => x.open = true)")
        text = seen.page.inner_text("body")
    rates = {m: np.array([counts_of(m, s)[-1] for s in (0, 1)])[..., 0] / 20 for m in METHODS}  # [seeds, clients]
    assert all(f"{value:.3f}" in text for own in rates.values() for value in own.ravel())
    for own in rates.values():
        assert f"{own.mean():.4f}" in text
        points = 100 * (own - rates["local"]).mean()  # 20.75 is printed as 20.7 or 20.8
        assert any(f"{points + rounding:+.1f}".removeprefix("+0.0") in text for rounding in (-1e-9, 1e-9))
    assert "0 B" in text and "500 kB" in text and "9 rounds" in text


def test_sort_highlight_copy_and_theme(browser: Browser, report: str) -> None:
    with opened(browser, report) as seen:
        page = seen.page
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])

        def column() -> list[float]:
            cells = page.locator(".sortable tbody tr td:nth-child(2)")
            return [float(value) for value in cells.evaluate_all("found => found.map(x => x.dataset.v)")]

        button = page.locator(".sortable thead button").nth(1)
        button.click()
        assert column() == sorted(column(), reverse=True)
        button.click()
        assert column() == sorted(column())
        assert page.locator(".sortable th").nth(1).get_attribute("aria-sort") == "ascending"
        chip = page.locator(".chip", has_text="FedRep")
        chip.click()
        page.mouse.move(0, 0)
        assert chip.get_attribute("aria-pressed") == "true" and page.locator("h1").is_visible()
        lit = page.locator(".card.on figcaption").all_inner_texts()
        assert len(lit) == 2 and all("FedRep" in text for text in lit)  # clients and curves
        page.locator("[data-copy=csv]").click()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied.splitlines()[0].startswith("label,method,") and len(copied.splitlines()) == 1 + len(METHODS)
        paper = seen.paper
        page.locator(".theme").click()
        assert seen.paper != paper
        assert not seen.said


def test_print_on_a4_cuts_nothing(browser: Browser, report: str) -> None:
    """All columns are on the page, and tables that are folded on a screen have their headings."""
    with opened(browser, report, width=718) as seen:
        seen.page.emulate_media(media="print")
        beyond = "found => found.filter(x => x.getBoundingClientRect().right > innerWidth + 1).map(x => x.outerHTML)"
        assert seen.page.eval_on_selector_all("table, td, th, p, figure", beyond) == []
        assert seen.page.locator("summary", has_text="More numbers").is_visible()
        assert seen.page.locator("[aria-label='More numbers'] td").first.is_visible()
        assert seen.page.locator(".forest td.plot").first.bounding_box()["width"] >= 150  # type: ignore[index]
