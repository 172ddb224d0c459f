"""Changes the code in one place at a time and runs tests: the mutants that survive are faults which no test finds.

    python -m benchmarks.tools.mutate --tests tests/methods tests/pflsim/fusion --count 30 --seed 1
    python -m benchmarks.tools.mutate --files pflsim/servers/fedas.py --tests tests/methods/test_reception.py --by-test

A mutant has another operator, comparison, constant, sign, condition or argument, or lacks a statement. It is never
written to disk: a forked process imports the changed source and runs pytest, after the libraries are imported once.
So tests that start programs or Ray see the code as it is, and tests must not need the threads of an earlier torch.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import importlib.machinery
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.cases import ROOT

FILES = [f"lightning_modules/{name}.py" for name in ("base", "loop", "phases", "anchor", "losses", "prototypes")]
FILES += ["lightning_modules/methods", "pflsim/servers", "pflsim/fusion", "pflsim/engine"]
LIBRARIES = "torch pytest pandas sklearn.datasets lightning_modules.light pflsim.cli"
PAIRS = "Add-Sub Mult-Div FloorDiv-Mult Mod-Add Pow-Mult Lt-LtE Gt-GtE Eq-NotEq In-NotIn Is-IsNot And-Or BitOr-BitAnd"
OTHER = {getattr(ast, name): getattr(ast, other) for pair in PAIRS.split() for name, other in [pair.split("-")]}
OTHER = {other: name for name, other in OTHER.items()} | OTHER


def _values(node: object) -> Iterator[ast.AST]:
    """A node's descendants that a run evaluates: no annotations, docstrings, errors or parts of strings."""
    if isinstance(node, ast.AST) and not isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
        yield node
        for name, child in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list", "bases"):
                for each in child if isinstance(child, list) else [child]:
                    yield from _values(each)


def _changed(node: ast.AST) -> Iterator[ast.AST]:
    """The node with one change."""
    new = copy.deepcopy(node)
    match new:
        case ast.BinOp() | ast.BoolOp() | ast.AugAssign() if type(new.op) in OTHER:
            new.op = OTHER[type(new.op)]()  # type: ignore[assignment]
            yield new
        case ast.Compare() if type(new.ops[0]) in OTHER:
            new.ops[0] = OTHER[type(new.ops[0])]()  # type: ignore[call-overload]
            yield new
        case ast.Constant(value=bool() | int() | float() as value):
            yield ast.Constant(not value if isinstance(value, bool) else value + 1)
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            yield new.operand
        case ast.IfExp():
            new.body, new.orelse = new.orelse, new.body
            yield new
        case ast.Call(args=[ast.expr() as first, ast.expr() as second, *rest]):
            new.args = [second, first, *rest]
            yield new
    if isinstance(node, ast.Call) and node.keywords:
        yield ast.Call(node.func, node.args, node.keywords[:-1])
    match node:
        case ast.AugAssign() | ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield ast.Pass()


def mutants(path: Path) -> list[tuple[str, bytes]]:
    """What is changed, and the file's text with it."""
    text, found = path.read_bytes(), []
    starts = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
    for node in _values(ast.parse(text)):
        for new in _changed(node):
            a, b = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
            put = ast.unparse(new) if isinstance(node, ast.stmt) else f"({ast.unparse(new)})"
            name = f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)} -> {put}"  # type: ignore[attr-defined]
            found.append((name, text[:a] + put.encode() + text[b:]))
    return found


def run(path: str, text: bytes | None, tests: Sequence[str], timeout: float, every: bool = False) -> list[str]:
    """The tests that fail with this text of a file: the first, or every one."""
    with tempfile.TemporaryFile("w+") as answer:
        if not (pid := os.fork()):
            try:
                for descriptor in (1, 2):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
                _become(path, text)
                print(*_failures(tests, every), file=answer, flush=True)
            except BaseException as error:
                print(repr(error).replace(" ", "_"), file=answer, flush=True)
            finally:
                os._exit(0)
        end = time.monotonic() + timeout
        while not os.waitpid(pid, os.WNOHANG)[0]:
            time.sleep(0.05)
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return ["timeout"]
        answer.seek(0)
        return answer.read().split()


def _become(path: str, text: bytes | None) -> None:
    """Let this process import the packages again, one file with another text."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("pflsim", "lightning_modules", "ray_actors")]:
        del sys.modules[name]
    original, pyc = importlib.machinery.SourceFileLoader.get_data, Path(path).stem + ".cpython"

    def get_data(self: importlib.machinery.SourceFileLoader, name: str) -> bytes:
        if text is not None and Path(name).name.startswith(pyc):
            raise OSError
        return text if text is not None and name == path else original(self, name)

    importlib.machinery.SourceFileLoader.get_data = get_data  # type: ignore[method-assign]
    sys.dont_write_bytecode = True


def _failures(tests: Sequence[str], every: bool) -> list[str]:
    import pytest

    failed: list[str] = []

    class Plugin:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                failed.append(report.nodeid.partition("[")[0])

    options = "-p no:cacheprovider -W ignore::pytest.PytestAssertRewriteWarning -o addopts=--import-mode=importlib"
    status = pytest.main([*options.split(), "-m", "not slow", *([] if every else ["-x"]), *tests], [Plugin()])
    return [*dict.fromkeys(failed)] or ([] if status == 0 else [f"status-{status}"])


def main() -> None:
    """Print which mutants survive, and of the others which tests find them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tests", nargs="+", required=True, help="what pytest gets: files, folders, -k ...")
    parser.add_argument("--files", nargs="+", default=FILES, help="files and folders to change")
    parser.add_argument("--count", type=int, default=20, help="how many mutants; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of mutants")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for a mutant; longer is a fault found")
    parser.add_argument("--by-test", action="store_true", help="run all tests and print every one that fails")
    args, rest = parser.parse_known_args()
    paths = [p for name in args.files for p in (sorted((ROOT / name).rglob("*.py")) or [ROOT / name])]
    found = [(path, *mutant) for path in paths for mutant in mutants(path)]
    found = random.Random(args.seed).sample(found, min(args.count or len(found), len(found)))
    tests = [*args.tests, *rest]
    for name in LIBRARIES.split():
        importlib.import_module(name)
    if failed := run("", None, tests, args.timeout):
        sys.exit(f"fails without a change: {failed}")
    survived = 0
    for path, name, text in found:
        survived += not (failed := run(str(path), text, tests, args.timeout, args.by_test))
        print("killed  " if failed else "SURVIVED", name, flush=True)
        for test in failed if args.by_test else ():
            print(f"    {test}")
    print(f"{len(found) - survived} of {len(found)} mutants were found")


if __name__ == "__main__":
    main()
