"""Our rounds for `python -m benchmarks.peers`: `python -m benchmarks.peers.ours OVERRIDES OUT`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pflsim
from benchmarks.cases import ROOT
from benchmarks.peers.nets import Clock
from pflsim.engine.callbacks import RoundResult

CONFIGS = ROOT / "benchmarks" / "configs"


def main() -> None:
    """Run the settings and write the time of every round."""
    *overrides, out = sys.argv[1:]
    clock = Clock(Path(out))

    def on_round(result: RoundResult) -> None:
        rows = [row for row in result.rows if row.split == "test" and row.model == "global"]
        clock.end(sum(row.correct or 0 for row in rows) / sum(row.total for row in rows))

    with tempfile.TemporaryDirectory() as folder:
        pflsim.run(overrides=overrides, config_dirs=[CONFIGS], run_dir=f"{folder}/run", callbacks=[on_round])


if __name__ == "__main__":
    main()
