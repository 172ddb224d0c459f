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
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
from made_runs import make_run

from pflsim.analysis.report import main

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

    def style(self, selector: str, name: str) -> str:
        """A computed style of the first element that fits."""
        asked = "([selector, name]) => getComputedStyle(document.querySelector(selector))[name]"
        return self.page.evaluate(asked, [selector, name])


@contextmanager
def opened(
    browser: Browser,
    url: str,
    *,
    width: int = 1400,
    scheme: Literal["light", "dark"] = "light",
) -> Iterator[Seen]:
    """Open a page; whatever it asks for outside the machine is refused and noted."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
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


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours as a browser gives them, `rgb(1, 2, 3)`; by the rule of WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def attributes(page: Any, selector: str, name: str) -> list[str]:
    """An attribute of all elements that fit."""
    return page.eval_on_selector_all(selector, f"found => found.map(each => each.getAttribute('{name}'))")


pytestmark = pytest.mark.slow

LONG = "a_method_with_a_name_that_is_longer_than_any_telephone_is_wide_and_has_no_place_to_break"
TEXTS = ("h1", ".about", ".short p", "nav a", "td", "thead th", "figcaption", "dd", "pre", ".banner")
COLOURS = 10


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a report about three methods, one of a very long name, one that is not complete."""
    root = tmp_path_factory.mktemp("runs")
    rng = np.random.default_rng(0)
    for method in ("local", "fedavg", LONG):
        counts = [[(int(n), 20) for n in rng.integers(5, 21, 30)] for _ in range(5)]
        folder = make_run(root / method, counts, val=counts, method=method, up=0 if method == "local" else 5000)
        held = (np.arange(30)[:, None] % np.arange(1, 5)).tolist()
        about = {"hash": "0" * 64, "data": "digits", "partition": "iid", "clients": 30, "classes": 4}
        counts = [dict.fromkeys(("train", "val", "test"), row) for row in held]
        (folder / "partition.json").write_text(json.dumps({**about, "class_counts": counts}))
    summary = root / "fedavg" / "summary.json"
    summary.write_text(summary.read_text().replace('"complete": true', '"complete": false'))
    out = root / "report.html"
    assert main([str(root), "--out", str(out)]) == 0
    return Path(out).as_uri()


@pytest.mark.parametrize("width", [360, 768, 1400])
def test_a_report_fits_the_window_and_asks_for_nothing(browser: Browser, report: str, width: int) -> None:
    with opened(browser, report, width=width) as seen:
        assert seen.too_wide <= 0
        assert not seen.refused and not seen.said
        assert seen.page.inner_text("h1").endswith(", fedavg and local on digits")
        assert seen.page.locator(".short").is_visible() and seen.page.locator("svg.chart").first.is_visible()
        wide = "found => found.filter(x => x.getBoundingClientRect().right > innerWidth + 1).map(x => x.outerHTML)"
        assert seen.page.eval_on_selector_all("figure, p, dl, h2, pre, .table, li", wide) == []


def test_text_in_charts_can_be_read_on_a_telephone(browser: Browser, report: str) -> None:
    """A text's size on the screen is its own times the scale of the chart."""
    size = """found => Math.min(...found.map(x => {
        const scale = x.getScreenCTM();
        return parseFloat(getComputedStyle(x).fontSize) * Math.hypot(scale.a, scale.b);
    }))"""
    with opened(browser, report, width=360) as seen:
        assert seen.page.eval_on_selector_all("svg.chart text", size) >= 8.5


def test_light_and_dark(browser: Browser, report: str) -> None:
    found = {}
    schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    for scheme in schemes:
        with opened(browser, report, scheme=scheme) as seen:
            paper = seen.style("body", "backgroundColor")
            behind = {".short p": ".short", "pre": "pre", ".banner": ".banner"}
            for text in TEXTS:
                elastic = seen.style(behind[text], "backgroundColor") if text in behind else paper
                assert contrast(seen.style(text, "color"), elastic) >= 4.5, (scheme, text)
            assert contrast(seen.style("svg.chart text", "fill"), paper) >= 4.5
            for number in range(COLOURS):
                shade = seen.page.evaluate(
                    "name => { const x = document.createElement('p'); x.style.color = `var(${name})`;"
                    " document.body.append(x); return getComputedStyle(x).color }",
                    f"--c{number + 1}",
                )
                assert contrast(shade, paper) >= 3, (scheme, number)
            found[scheme] = paper, seen.style("svg.chart text", "fill"), seen.style("svg.chart path", "stroke")
    assert all(light != dark for light, dark in zip(found["light"][:2], found["dark"][:2], strict=True))
    assert contrast(found["light"][0], found["dark"][0]) > 10


def test_a_report_is_accessible(browser: Browser, report: str) -> None:
    with opened(browser, report) as seen:
        assert attributes(seen.page, "html", "lang") == ["en"]
        levels = seen.page.eval_on_selector_all("h1, h2, h3", "found => found.map(each => +each.tagName[1])")
        assert levels[0] == 1 and levels.count(1) == 1
        assert all(b - a <= 1 for a, b in zip(levels, levels[1:], strict=False))
        assert all(attributes(seen.page, "svg.chart", "aria-label"))
        assert set(attributes(seen.page, "th", "scope")) <= {"col", "row", "colgroup"}
        assert all(attributes(seen.page, ".table", "tabindex"))  # can be scrolled without a mouse


def test_a_grid_is_a_short_page_and_can_be_read_on_a_telephone(browser: Browser, tmp_path: Path) -> None:
    """Sixteen runs; a table that is scrolled to its end still shows the names of its lines."""
    for number, (method, lr, momentum) in enumerate(product(("a", "b"), (0.1, 0.2, 0.3, 0.4), (0.0, 0.5))):
        counts = [[(10 + number // 2, 20)] * 5] * 3
        make_run(tmp_path / f"{number}", counts, val=counts, method=method, lr=lr, momentum=momentum)
    assert main([str(tmp_path), "--out", str(tmp_path / "report.html")]) == 0
    address = (tmp_path / "report.html").as_uri()
    with opened(browser, address) as seen:
        assert seen.page.evaluate("document.documentElement.scrollHeight") <= 6000
        assert seen.page.locator("td.heat").count() == 16
    with opened(browser, address, width=390) as seen:
        assert seen.too_wide <= 0
        scrolled = """found => found.map(box => {
            box.scrollLeft = 10000;
            const left = box.getBoundingClientRect().left;
            const names = [...box.querySelectorAll("tr > th:first-child")];
            return names.every(x => x.getBoundingClientRect().left >= left - 1);
        })"""
        assert all(seen.page.eval_on_selector_all(".table", scrolled))
