"""The check of a GPU, tried on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases import ROOT


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


ALL_PARTS = """
import sys
from benchmarks.gpu_check.__main__ import main
sys.exit(any([main([*sys.argv[1:], "--parts", part, "--shard", "0", "1"]) for part in "1234"]))
"""
"""In one process, which imports torch once."""


@pytest.mark.slow
def test_every_part_without_ray(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError('refused')")
    few = ["--only", "precisions,waits,kernels,share of,on Ray", "--device", "cpu", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    subprocess.run([sys.executable, "-c", ALL_PARTS, *few], cwd=ROOT, env=environment, check=True)
    found = results(tmp_path)
    assert {row["part"] for row in found} == {1, 2, 3, 4}
    assert {row["check"] for row in found if row["result"] == "skipped"} == {"mlp, waits", "on Ray, 4 actors"}
