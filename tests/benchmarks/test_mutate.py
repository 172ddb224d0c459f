"""Mutants: what is changed, and that a test's verdict is about the changed code."""

import ast
from pathlib import Path

import pytest

from benchmarks.tools import mutate

CODE = '''
"""A docstring with 1."""
LIMIT = 3

def clipped(x: int = 2) -> int:
    if x < LIMIT and not x == 0:
        return max(x - 1, LIMIT)
    log(f"{x + 1}")
    raise ValueError(1)
'''


def test_each_mutant_has_one_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither annotations, docstrings and errors nor what stands in strings is changed."""
    (tmp_path / "code.py").write_text(CODE)
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    found = mutate.mutants(tmp_path / "code.py")
    changes = {name.partition(": ")[2] for name, _ in found}
    assert changes == {
        "3 -> (4)", "2 -> (3)", "x < LIMIT and (not x == 0) -> (x < LIMIT or not x == 0)", "x < LIMIT -> (x <= LIMIT)",
        "not x == 0 -> (x == 0)", "x == 0 -> (x != 0)", "0 -> (1)", "max(x - 1, LIMIT) -> (max(LIMIT, x - 1))",
        "x - 1 -> (x + 1)", "1 -> (2)", "log(f'{x + 1}') -> pass",
    }  # fmt: skip
    assert all(ast.parse(text) and text != CODE.encode() for _, text in found)


TEST = """
from pflsim.seeding import coin
def test_found(): assert not coin(0, 1, 0.0)
def test_not_found(): pass
"""


@pytest.mark.slow
def test_a_mutant_is_found_by_the_tests_that_look_at_it(tmp_path: Path) -> None:
    (tmp_path / "test_coin.py").write_text(TEST)
    path = mutate.ROOT / "pflsim" / "seeding.py"
    text = path.read_bytes().replace(b"def coin(", b"def coin(*_): return True\n\n\ndef _coin(")
    tests = [str(tmp_path / "test_coin.py"), "-c", str(mutate.ROOT / "pyproject.toml")]
    assert mutate.run(str(path), None, tests, 100) == []
    assert [name.rpartition("::")[2] for name in mutate.run(str(path), text, tests, 100, every=True)] == ["test_found"]
