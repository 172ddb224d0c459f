"""`python launch.py compare RUNS…`: runs side by side."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pflsim.errors import SettingsError

EXAMPLES = """examples:
  python launch.py compare 'runs/20261122-*'                      what a pattern stands for
  python launch.py compare runs --reference fedavg --target 0.9   all runs in a folder, held against FedAvg
  python launch.py compare runs --out table.tex                   for a paper; .md, .csv and .txt likewise
  python launch.py compare runs --curves acc.pdf --against bytes  accuracy by traffic
  python launch.py compare --experiment pfedcfr_table2_mnist      runs of an experiment beside the paper's figures

Runs that differ in nothing but their seed make a group, a line of the table. Groups can be compared where every seed
has the same partition (its hash), all have the same seeds, models are judged on the same clients equally often, and
all runs are complete; anything else is refused. What may differ (rounds, lr, model, ...) is in the labels.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare what the command line says.

    Returns:
        The exit status: 2, it cannot be done.
    """
    options = _options(arguments)
    try:
        _beside_the_paper(options) if options.experiment else _compare(options)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read it has seen enough
        return 0
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python launch.py compare",
        description="Puts runs side by side: accuracy over seeds, traffic, and differences client by client.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUNS", help="run folders, folders of run folders, or patterns; with --experiment "
        "the default is runs/")  # fmt: skip
    add("--experiment", metavar="NAME", help="put runs of this experiment beside what its paper has printed, with the "
        "round that the paper reports")  # fmt: skip
    add("--at", choices=["best_val", "last", "best_test_oracle"], help="the round that figures are taken from: the "
        "best by validation (default where all runs have validation data), the last (default otherwise), or the best "
        "by test data, which is an oracle's")  # fmt: skip
    add("--target", type=_share, metavar="ACC", help="an accuracy in [0, 1] to reach; default: the highest that every "
        "run reaches, rounded down to a hundredth")  # fmt: skip
    add("--reference", metavar="LABEL", help="what the others are held against: a label of the table, or a method; "
        "default: local where it is there, else the first")  # fmt: skip
    add("--format", choices=["text", "markdown", "latex", "csv"], help="default: what the name of --out says, or text")
    add("--out", type=Path, metavar="FILE", help="write into a file (.txt, .md, .tex, .csv) instead of printing")
    add("--curves", type=Path, metavar="FILE", help="draw accuracy by round into a .png, .svg or .pdf")
    add("--against", choices=["rounds", "bytes", "seconds"], help="what the curves are drawn against; default: rounds")
    add("--anyway", action="store_true", help="compare runs that should not be compared, and say why they should not")
    options = parser.parse_args(arguments)
    if options.against and not options.curves:
        parser.error("--against goes with --curves FILE")
    others = [f"--{name}" for name in ("at", "target", "reference", "curves") if getattr(options, name) is not None]
    if options.experiment and others:
        parser.error(f"{others[0]} does not go with --experiment, which compares as the paper does")
    if not options.runs and not options.experiment:
        parser.error("the following arguments are required: RUNS")
    return options


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a share in [0, 1], like 0.9")
    return value


def _compare(options: argparse.Namespace) -> None:
    from pflsim.analysis.compare.comparison import compare
    from pflsim.analysis.compare.curves import check_picture, draw
    from pflsim.analysis.compare.formats import format_of, render
    from pflsim.analysis.results import check_comparable, find_runs, group_runs, read_run

    kind = options.format or format_of(options.out)
    if options.curves:
        check_picture(options.curves)
    groups = group_runs(read_run(folder) for folder in find_runs(options.runs))
    objections = check_comparable(groups)
    if objections and not options.anyway:
        listed = "\n".join(f"  {objection}" for objection in objections)
        raise SettingsError(f"these runs cannot be compared as they are (--anyway does it all the same):\n{listed}")
    for objection in objections:
        print(f"warning: {objection}", file=sys.stderr)
    comparison = compare(
        groups, choice=options.at, target=options.target, reference=options.reference, objections=objections
    )
    _put(render(comparison, kind, None if options.out else sys.stdout), options.out)
    if options.curves:
        draw(comparison, options.curves, options.against or "rounds")
        print(f"curves in {options.curves}", file=sys.stderr)


def _beside_the_paper(options: argparse.Namespace) -> None:
    from pflsim.analysis.compare.formats import format_of
    from pflsim.analysis.compare.paper import paper_table
    from pflsim.analysis.compare.paper_formats import render_paper
    from pflsim.analysis.results import find_runs, read_run

    kind = options.format or format_of(options.out)
    folders = find_runs(options.runs) if options.runs else find_runs(["runs"]) if any(Path("runs").glob("*/*")) else []
    runs = []
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except SettingsError as error:  # one that cannot be read does not keep the others from being compared
            print(f"warning: {error}", file=sys.stderr)
    found = paper_table(options.experiment, runs, options.anyway)
    _put(render_paper(found, kind, None if options.out else sys.stdout), options.out)


def _put(rendered: str, out: Path | None) -> None:
    if out:
        out.write_text(rendered + "\n", encoding="utf-8")
        print(f"written to {out}")
    else:
        print(rendered, flush=True)
