"""Reads the documentation: its files, code blocks, commands and tables."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
FILE_BLOCK = re.compile(r"^`(mine/[\w/.]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """The arguments of a launch.py command on a page."""

    page: Path
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page.name}: {' '.join(self.arguments)}"


def files_of(page: Path) -> dict[str, str]:
    """Return the files that a page spells out, by path."""
    return dict(FILE_BLOCK.findall(page.read_text(encoding="utf-8")))


def write_files(page: Path, folder: Path) -> None:
    """Write the files that a page spells out below a folder."""
    for name, text in files_of(page).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def commands(page: Path) -> list[Command]:
    """Return every `python launch.py ...` and `make run ARGS="..."` of a page, in code blocks and in the text."""
    text = page.read_text(encoding="utf-8")
    lines = [line for _, _, block in FENCE.findall(text) for line in block.replace("\\\n", "").splitlines()]
    lines += re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    found = []
    for line in lines:
        line = line.partition(" && ")[0]
        words = shlex.split(line, comments=True) if "launch.py" in line or "make run" in line else []
        if words[:2] == ["python", "launch.py"]:
            found.append(Command(page, tuple(words[2:])))
        elif words[:2] == ["make", "run"]:
            given = [word.removeprefix("ARGS=") for word in words[2:] if word.startswith("ARGS=")]
            found.append(Command(page, tuple(shlex.split(" ".join(given)))))
    return found


def rows(text: str, header: str) -> list[list[str]]:
    """Return the cells of the first table whose first header cell is `header`."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {header} |"))
    cells = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return cells
