#!/usr/bin/env bash
# Checks a GPU on a machine without network: installs what is missing there from gpu-bundle/, and runs the check.
# bash benchmarks/gpu_check.sh [--parts 1,2] [--seconds 420] [--device cpu] [--out FOLDER]; PYTHON=... chooses a Python.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} site=$PWD/gpu-bundle/site
export PYTHONPATH=$site:$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$site"

halves=(gpu-bundle/ray-1/*.part gpu-bundle/ray-2/*.part)
if [ -e "${halves[0]}" ] && [ -e "${halves[1]:-}" ]; then
  wheel=$(basename "${halves[0]}" .1.part)
  cat "${halves[@]}" > "gpu-bundle/wheels/$wheel"
fi
# A wheel is missing if this Python has no distribution of its name.
missing=$("$python" - gpu-bundle/wheels/*.whl <<'EOF'
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

for wheel in sys.argv[1:]:
    try:
        version(Path(wheel).name.split("-")[0].replace("_", "-"))
    except PackageNotFoundError:
        print(wheel)
EOF
)
if [ -n "$missing" ]; then
  # shellcheck disable=SC2086
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" $missing
fi
exec "$python" -m benchmarks.gpu_check "$@"
