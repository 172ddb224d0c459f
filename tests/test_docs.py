"""The documentation is true: files, names, links, commands, tables and the code that it shows."""

import ast
import importlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import FENCE, PAGES, ROOT, Command, commands, rows, write_files

import pflsim
from pflsim import cli
from pflsim.analysis.probe import FINETUNED
from pflsim.config.checks import check
from pflsim.config.components import resolve, settings_of, targets_of
from pflsim.config.compose import CONFIGS, composed, parse, sweep, to_settings
from pflsim.config.names import written
from pflsim.display.identity import FAMILIES, listed_identities
from pflsim.records.folder import STATUS

README = ROOT / "README.md"
START = ROOT / "docs" / "start.md"
GUIDE = ROOT / "docs" / "guide.md"
OVERVIEW = ROOT / "docs" / "methods" / "index.md"
METHODS = sorted({*OVERVIEW.parent.glob("*.md")} - {OVERVIEW})
TOP = "pflsim|lightning_modules|ray_actors|configs|tests|docs|benchmarks"
PLACE = re.compile(rf"^(?:{TOP})/[\w./-]*$|^[\w-]+\.(?:py|toml|txt)$|^(?:Makefile|Dockerfile|CONTRIBUTING\.md)$")
FILE_NAMES = {p.name for folder in ("pflsim",) for p in (ROOT / folder).rglob("*.py")} | {STATUS}
COMMANDS = list({command.arguments: command for path in PAGES for command in commands(path)}.values())
"""Each command of the documentation once, however many pages have it."""

each_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


def spans(path: Path) -> list[str]:
    """Return everything in `backticks` outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", path.read_text(encoding="utf-8")))


@each_page
def test_files_that_are_mentioned_exist(path: Path) -> None:
    """With their path; a bare name may also be a file of pflsim or of a run folder."""
    for text in spans(path):
        name = text.partition("::")[0]
        if PLACE.match(name) and "GROUP" not in name:
            assert (ROOT / name).exists() or ("/" not in name and name in FILE_NAMES), name


@each_page
def test_names_that_are_mentioned_exist(path: Path) -> None:
    """`path/file.py::Class.method` is defined there."""
    for text in spans(path):
        file, mark, name = text.partition("::")
        if not mark:
            continue
        body: Any = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
        for step in name.split("."):
            found = [n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == step]
            assert found, text
            body = found[-1].body


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@each_page
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", path.read_text(encoding="utf-8"))):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        linked = path.parent / name if name else path
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_the_readme_is_short_and_shows_fedprox_as_it_is() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 110
    (shown,) = [body for _, language, body in FENCE.findall(text) if language == "python" and body.startswith("class")]
    source = (ROOT / "lightning_modules" / "methods" / "fedprox.py").read_text(encoding="utf-8")
    assert code(shown)[-1] == code(source)[-1]


def code(source: str) -> list[str]:
    """Return the statements of a module without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return [ast.unparse(statement) for statement in tree.body]


def test_the_citation_is_that_of_the_package() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert cited["cff-version"] == "1.2.0" and cited["message"] and cited["title"] == project["name"]
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])
    assert cited["authors"] == project["authors"] and cited["repository-code"] == project["urls"]["Homepage"]


def test_the_reference_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "make_reference.py"))["page"]
    assert (ROOT / "docs" / "reference.md").read_text(encoding="utf-8") == page(), "run: make docs"


@pytest.mark.slow
def test_the_site(tmp_path: Path) -> None:
    """It builds without a network and without warnings, and the API page has every public function and class."""
    options = ["--quiet", "--fail-on-warning", "-d", str(tmp_path / "doctrees")]
    subprocess.run([sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(tmp_path)], cwd=ROOT, check=True)
    listed = set(re.findall(r'id="pflsim\.(\w+)"', (tmp_path / "api.html").read_text(encoding="utf-8")))
    assert set(pflsim.__all__) <= listed
    assert {path.stem for path in METHODS} <= {path.stem for path in (tmp_path / "methods").glob("*.html")}
    families = re.findall(r"^## (.+)$", OVERVIEW.read_text(encoding="utf-8"), re.MULTILINE)
    navigation = (tmp_path / "methods" / "fedavg.html").read_text(encoding="utf-8")
    assert re.findall(r'<li class="caption">(.+?)</li>', navigation) == families
    for page in (tmp_path / "add-a-method.html", *(tmp_path / "methods" / f"{path.stem}.html" for path in METHODS)):
        shown = re.sub(r"<pre>.*?</pre>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert "<math" in shown and not re.search(r"\\[a-z]+[{_ ]", shown), page
    scripts = re.findall(r'<script[^>]* src="([^"]*)"', (tmp_path / "index.html").read_text(encoding="utf-8"))
    assert scripts and not [source for source in scripts if source.startswith("http")]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_commands_compose(command: Command, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command is valid, of a sweep the first and the last run; nothing is run."""
    for page in (ROOT / "docs" / "add-a-method.md", command.page):
        write_files(page, here)
    Path("DIR").mkdir()
    for folder in (Path(), Path("examples")):
        folder.mkdir(exist_ok=True)
        shutil.copy(ROOT / "examples" / "visits.csv", folder)
    Path("notes.csv").write_text("hospital,urgent,note\n" + "Bern,no,all well\nBasel,yes,in pain\n" * 8)
    Path("docstrings.csv").write_text("package,text\n" + "numpy,of arrays\nray,of actors\n" * 8)
    Path("contraception.csv").write_text("district,use,age\n" + "1,Y,3.5\n2,N,-1.5\n" * 8)
    if command.arguments[:1] and command.arguments[0] in cli.COMMANDS:
        module, parsed = importlib.import_module(cli.COMMANDS[command.arguments[0]]), list[Any]()
        monkeypatch.setattr(module, "execute", parsed.append)
        assert cli.main(command.arguments) == 0
        if command.arguments[0] == "submit":
            cli.checked(parsed[0].overrides, parsed[0].multirun, parsed[0].config_dir)
        return
    options = cli._options(command.arguments[command.arguments[:1] == (cli.PARTITION,) :])
    options.overrides = [text for text in options.overrides if not text.startswith((cli.RESUME, cli.INTO))]
    folders = [CONFIGS, *(here / folder for folder in options.config_dir)]
    values = parse(options.overrides)
    jobs = sweep(values) if options.multirun else [values]
    for job in jobs if len(jobs) < 3 else (jobs[0], jobs[-1]):
        check(to_settings(composed(job, folders)))


@pytest.mark.slow
def test_the_table_of_the_readme(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its commands and its Python run as they are written, and `docs/start.md` shows the first lines of the file."""
    Path("examples").mkdir()
    table = Path(shutil.copy(ROOT / "examples" / "visits.csv", "examples")).read_text(encoding="utf-8")
    (shown,) = [body for _, _, body in FENCE.findall(START.read_text(encoding="utf-8")) if "hospital," in body]
    assert table.startswith(shown) and len(table.encode()) < 40_000 and ",," in table
    sweep_, report = [c.arguments for c in commands(README) if "visits" in str(c)]
    assert cli.main(sweep_) == 0 and cli.main(report) == 0 and Path("report.html").is_file()
    (block,) = [
        body for _, language, body in FENCE.findall(README.read_text("utf-8")) if "visits.csv" in body and language
    ]
    Path("script.py").write_text(block, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0 and "Ditto" in done.stdout, done.stderr


def defaults(group: str, name: str) -> dict[str, str]:
    """Return the default settings of a component, written as on the command line."""
    node = yaml.safe_load((ROOT / "configs" / group / f"{name}.yaml").read_text(encoding="utf-8"))
    known = settings_of(targets_of(node, group))
    return {key: written(node.get(key, p.default)) for key, p in known.items()}


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_settings_tables_of_methods(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    known = {f"`method.{key}`": value for key, value in defaults("method", path.stem).items()}
    listed = {cells[0]: cells[1] for cells in rows(text, "setting")} if known else {}
    assert listed == known
    assert ("It has no settings of its own" in text) == (not known)


def test_every_method_has_a_page() -> None:
    assert {p.stem for p in METHODS} == {p.stem for p in (ROOT / "configs" / "method").glob("*.yaml")}


def test_the_tables_of_methods() -> None:
    """A table for each family, named as in the report, with the model that each method reports, and a paper."""
    sections = OVERVIEW.read_text(encoding="utf-8").split("\n## ")[1:]
    tables = [{re.findall(r"`([^`]+)`", cells[0])[0]: cells[2:] for cells in rows(text, "method")} for text in sections]
    families: dict[str, set[str]] = {}
    for name, identity in listed_identities().items():
        if name == FINETUNED or identity.family == "baseline":  # of `probe` and of `baselines` only
            continue
        families.setdefault(FAMILIES[identity.family], set()).add(name)
    assert {text.splitlines()[0]: {*table} for text, table in zip(sections, tables, strict=True)} == families
    listed = {name: cells for table in tables for name, cells in table.items()}
    known = {}
    for path in (ROOT / "configs" / "method").glob("*.yaml"):
        target = yaml.safe_load(path.read_text(encoding="utf-8"))["client"]["_target_"]
        known[path.stem] = resolve(target).reported_model  # type: ignore[attr-defined]
    assert {name: cells[0] for name, cells in listed.items()} == known
    assert {name for name, cells in listed.items() if not cells[1]} == {"local"}


def test_contents_of_a_run_folder(here: Path) -> None:
    """The guide's table names every file that a run leaves, and its numpy check comes out."""
    text = GUIDE.read_text(encoding="utf-8")
    (command,) = [c for c in COMMANDS if "run_dir=runs/traced" in c.arguments]
    assert cli.main(command.arguments) == 0
    named = {name for cells in rows(text, "file") for name in re.findall(r"`([\w.]+)[\w/]*`", cells[0])}
    left = {re.sub(r"(tfevents)\..*", r"\1...", p.name) for p in Path("runs/traced").iterdir()}
    assert left <= named
    (block,) = [body for _, _, body in FENCE.findall(text) if "load_file" in body]
    said: list[float] = []
    exec(block, {"print": said.append})
    assert 0 < said[0] < 1e-7
