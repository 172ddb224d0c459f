"""Pages looked at in a headless Chromium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOW = "apt-get install chromium, or set PFLSIM_CHROMIUM to the program"


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the Chromium of this machine, or skip the test."""
    program = os.environ.get("PFLSIM_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no Chromium: {HOW}")
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -e '.[dev]'")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


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
    allowed: tuple[str, ...] = ("file:", "data:"),
) -> Iterator[Seen]:
    """Open a page; whatever it asks for elsewhere than allowed is refused and noted."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    seen = Seen(page)

    def decide(route: Route) -> None:
        if route.request.url.startswith(allowed):
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
