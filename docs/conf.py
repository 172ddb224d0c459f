"""Settings of the documentation site: `make docs`."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from textwrap import fill
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.ext.napoleon.docstring import GoogleDocstring

from pflsim.cli import COMMANDS, main
from pflsim.display.identity import identity

HERE = Path(__file__).parent
ROOT = HERE.parent

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
project, release = PROJECT["name"], PROJECT["version"]
author = copyright = PROJECT["authors"][0]["name"]


def second_column(line: str) -> int:
    """Return where the second column of a line of help begins, or its text if it has one column."""
    return len((re.match(r"\s*\S+( \S+)*\s{2,}|\s*", line) or [""])[0])


# Sphinx reads below docs/ only. The help of every command is on docs/command-line.rst.
GENERATED = HERE / "generated"
GENERATED.mkdir(exist_ok=True)
for notebook in (ROOT / "examples").glob("*.ipynb"):
    shutil.copy2(notebook, GENERATED)
sys.argv[0], os.environ["COLUMNS"] = "pflsim", "90"  # what the help calls the program, and its width
for command in ("", *COMMANDS):
    with redirect_stdout(StringIO()) as said, suppress(SystemExit):
        main([*command.split(), "--help"])
    lines = [fill(line, 96, subsequent_indent=" " * second_column(line)) for line in said.getvalue().splitlines()]
    (GENERATED / f"{command or 'pflsim'}.txt").write_text("\n".join(lines), encoding="utf-8")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["alert", "colon_fence", "dollarmath"]
myst_heading_anchors = 4
highlight_language = "none"
nb_execution_mode = "off"  # tests/test_wheel.py runs the notebooks

default_role = "py:obj"  # docstrings have `names` in single backticks
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = "pflsim"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
pygments_style, pygments_dark_style = "friendly", "github-dark"
html_theme_options: dict[str, object] = {
    "light_css_variables": {"color-brand-primary": "#1d5bb8", "color-brand-content": "#1d5bb8"},  # the report's colours
    "dark_css_variables": {
        "color-brand-primary": "#7fb0ff",
        "color-brand-content": "#7fb0ff",
        "color-background-primary": "#15171b",
    },
    "source_repository": PROJECT["urls"]["Homepage"],
    "source_branch": "main",
    "source_directory": "docs/",
}


MARKUP = re.compile(r"`[^`]*`|^ *(?:>>>|\.\.\.).*$|([*|]|(?<=\w)_(?!\w))", re.MULTILINE)
"""Code, examples, and (as group 1) characters that mean something in reStructuredText only."""


def read_docstring(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Make reStructuredText of a docstring in Google's style, in which |x|, *shape and end_ are plain text."""
    text = MARKUP.sub(lambda found: f"\\{found[0]}" if found[1] else found[0], "\n".join(lines))
    lines[:] = GoogleDocstring(text).lines()


def list_methods(app: Sphinx, page: str, source: list[str]) -> None:
    """Make the methods that methods/index.md links to its entries in the navigation, in the same order."""
    if page == "methods/index":
        names = re.findall(r"^\| \[[^]]+\]\((\w+)\.md\)", source[0], re.MULTILINE)
        source[0] += "\n".join(["\n:::{toctree}", ":hidden:", "", *names, ":::"])


def name_families(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Put the headings of methods/index.md above the first method of each family in the navigation.

    Sphinx shows captions of the toctrees of the first page only.
    """
    text = (HERE / "methods/index.md").read_text(encoding="utf-8")
    for title, first in re.findall(r"^## (.+)\n(?:.*\n)*?\| \[[^]]+\]\((\w+)\.md\)", text, re.MULTILINE):
        link = re.escape(app.builder.get_relative_uri(page, f"methods/{first}") or "#")
        item = rf'(<li class="toctree-l2[^>]*><a [^>]*href="{link}")'
        tree = context["furo_navigation_tree"]
        context["furo_navigation_tree"] = re.sub(item, rf'<li class="caption">{title}</li>\1', tree)


MARKS = (ROOT / "pflsim/analysis/report/templates/marks.html").read_text(encoding="utf-8")


def mark_methods(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Put the mark of each method, in its colour, before its name on methods/index and on its own page."""

    def marked(found: re.Match[str]) -> str:
        who = identity(found["name"] or Path(page).name)
        mark = f'<svg viewBox="-7 -7 14 14" aria-hidden="true"><use href="#k-{who.mark}"/></svg>'
        own = f' class="method" style="--light: {who.light}; --dark: {who.dark}">'
        return found[0].replace(">", own, 1) + mark

    if page.startswith("methods/"):
        names = r'<td><p>(?=<a [^>]*href="(?P<name>\w+)\.html">)' if page == "methods/index" else "<h1>(?P<name>)"
        body = re.sub(r"(/|::)(?=[^<>]*</span></code>)", r"\1<wbr>", context["body"])  # where paths of code may break
        context["body"] = MARKS + re.sub(names, marked, body)


def mathml(tex: str, display: str) -> str:
    """Return a formula in MathML, with upright primes, bars as high as the letters, and a space after functions."""
    written = convert(tex, display=display).replace("<mi>&#x02032;</mi>", "<mo>&#x02032;</mo>")
    written = re.sub("<mo>(&#x02016;|&#x0007C;)", r'<mo stretchy="false" lspace="0" rspace="0">\1', written)
    return re.sub("<mi>(log|cos|arccos)</mi>", r'<mo lspace="0.17em" rspace="0.17em">\1</mo>', written)


def setup(app: Sphinx) -> None:
    """Write formulas as MathML, which browsers show without scripts or a network."""
    app.connect("autodoc-process-docstring", read_docstring)
    app.connect("source-read", list_methods)
    app.connect("html-page-context", name_families, priority=900)  # after the theme
    app.connect("html-page-context", mark_methods)

    def inline(translator, node: nodes.math) -> None:
        translator.body.append(mathml(node.astext(), "inline"))
        raise nodes.SkipNode

    def display(translator, node: nodes.math_block) -> None:
        translator.body.append(f'<div class="math">{mathml(node.astext(), "block")}</div>')
        raise nodes.SkipNode

    app.add_html_math_renderer("mathml", (inline, None), (display, None))
