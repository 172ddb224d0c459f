"""What the documentation says is so: files, names, links, commands and tables."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import FENCE, PAGES, ROOT, Command, commands, rows, write_files

from lightning_modules.base import ClientModule
from pflsim import cli
from pflsim.config.checks import check, check_sweep
from pflsim.config.components import resolve, settings_of, targets_of
from pflsim.config.compose import CONFIGS, composed, composing, plain, sweep
from pflsim.config.settings import Settings
from ray_actors.jobs.command import parser

README = ROOT / "README.md"
METHODS = sorted((ROOT / "docs" / "methods").glob("*.md"))
TOP = "pflsim|lightning_modules|ray_actors|configs|tests|docs|benchmarks"
PLACE = re.compile(rf"^(?:{TOP})/[\w./-]*$|^[\w-]+\.(?:py|toml|txt)$|^Makefile$")
FILE_NAMES = {p.name for folder in ("pflsim",) for p in (ROOT / folder).rglob("*.py")}
COMMANDS = [command for page in PAGES for command in commands(page)]


@pytest.fixture(params=PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


def spans(page: Path) -> list[str]:
    """Everything in `backticks`, outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text(encoding="utf-8")))


def test_files_that_are_mentioned_exist(page: Path) -> None:
    """With their path; a bare name may also be a file beside others that are named with theirs."""
    for text in spans(page):
        name = text.partition("::")[0]
        if PLACE.match(name) and "GROUP" not in name:
            assert (ROOT / name).exists() or ("/" not in name and name in FILE_NAMES), f"{page.name}: {name}"


def test_names_that_are_mentioned_exist(page: Path) -> None:
    """`path/file.py::Class.method` is defined there."""
    for text in spans(page):
        path, mark, name = text.partition("::")
        if not mark:
            continue
        body: Any = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
        for part in name.split("."):
            found = [n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == part]
            assert found, f"{page.name}: {text}"
            body = found[-1].body


def anchors(path: Path) -> set[str]:
    """The headings of a page as links name them."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text(encoding="utf-8"))):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(path), f"{page.name}: {target}"


def test_pictures_are_small() -> None:
    assert all(p.stat().st_size < 200_000 for p in (ROOT / "docs").rglob("*.png"))


def test_places_for_measured_results() -> None:
    for path in (README, ROOT / "docs" / "methods" / "pfedcfr.md"):
        text = path.read_text(encoding="utf-8")
        assert text.count("<!-- results:begin -->") == text.count("<!-- results:end -->") == 1


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_commands_compose(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command is understood; nothing is run."""
    write_files(ROOT / "docs" / "add-a-method.md", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "DIR").mkdir()
    if command.arguments[:1] and command.arguments[0] in cli.COMMANDS:
        given = parser(command.arguments[0]).parse_intermixed_args(command.arguments[1:])
        if command.arguments[0] == "submit":
            cli.checked(given.overrides, given.multirun, given.config_dir)
        return
    options = cli._options(command.arguments)
    options.overrides = [text for text in options.overrides if not text.startswith(cli.RESUME)]
    folders = [CONFIGS, *(tmp_path / folder for folder in options.config_dir)]
    with composing(folders):
        jobs = sweep(options.overrides, folders) if options.multirun else [options.overrides]
        runs = [plain(composed(job, folders)) for job in jobs]
    for settings in runs:
        check(settings)
    check_sweep(runs)


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 20


def defaults(group: str, name: str) -> dict[str, str]:
    """A part's settings with the values that they have when nothing is said, as the documentation writes them."""
    node = yaml.safe_load((ROOT / "configs" / group / f"{name}.yaml").read_text(encoding="utf-8"))
    known = settings_of(targets_of(node, group))
    return {key: written(node.get(key, p.default)) for key, p in known.items()}


def written(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(written, value))}]"
    return str(value)


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_settings_tables_of_methods(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    known = {f"`method.{key}`": value for key, value in defaults("method", path.stem).items()}
    listed = {cells[0]: cells[1] for cells in rows(text, "setting")} if known else {}
    assert listed == known
    assert ("It has no settings of its own" in text) == (not known)


def test_every_method_has_a_page() -> None:
    assert {p.stem for p in METHODS} == {p.stem for p in (ROOT / "configs" / "method").glob("*.yaml")}


@pytest.mark.parametrize("group", ["method", "data", "partition", "split", "model"])
def test_tables_of_choices(group: str) -> None:
    """Every file of a group has its row, and the row its settings."""
    table = {}
    for cells in rows(README.read_text(encoding="utf-8"), group):
        given = dict(pair.split("=", 1) for pair in re.findall(r"`([^`]+)`", cells[-1]))
        table |= dict.fromkeys(re.findall(r"`([^`]+)`", cells[0]), given)
    known = {p.stem: defaults(group, p.stem) for p in (ROOT / "configs" / group).glob("*.yaml")}
    if group == "data":  # said once, above the table
        known = {name: {k: v for k, v in given.items() if k != "standardize"} for name, given in known.items()}
    assert table == known


def test_the_table_of_methods_says_what_judges_them() -> None:
    table = {re.findall(r"`([^`]+)`", cells[0])[0]: cells[2] for cells in rows(README.read_text("utf-8"), "method")}
    known = {}
    for path in (ROOT / "configs" / "method").glob("*.yaml"):
        target = yaml.safe_load(path.read_text(encoding="utf-8"))["client"]["_target_"]
        known[path.stem] = resolve(target, ClientModule).reported_model  # type: ignore[attr-defined]
    assert table == known


def run_defaults(settings: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in vars(settings).items():
        if hasattr(value, "__dataclass_fields__"):
            yield from run_defaults(value, f"{prefix}{key}.")
        else:
            yield prefix + key, written(value)


def test_table_of_common_settings() -> None:
    known = dict(run_defaults(Settings()))
    given = [
        p for cells in rows(README.read_text(encoding="utf-8"), "setting") for p in re.findall(r"`([^`]+)`", cells[0])
    ]
    assert given and all(known.get(pair.partition("=")[0]) == pair.partition("=")[2] for pair in given)


def test_contents_of_a_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's table names every file that a run leaves, and its numpy check comes out."""
    monkeypatch.chdir(tmp_path)
    text = README.read_text(encoding="utf-8")
    (command,) = [c for c in COMMANDS if "run_dir=runs/traced" in c.arguments]
    assert cli.main(command.arguments) == 0
    named = {name for cells in rows(text, "file") for name in re.findall(r"`([\w.]+)[\w/]*`", cells[0])}
    assert {p.name for p in (tmp_path / "runs" / "traced").iterdir()} <= named
    (block,) = [body for _, _, body in FENCE.findall(text) if "load_file" in body]
    said: list[float] = []
    exec(block, {"print": said.append})
    assert 0 < said[0] < 1e-7
