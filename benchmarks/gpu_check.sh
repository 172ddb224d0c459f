#!/usr/bin/env bash
# Checks a GPU on a machine without network: installs what is missing there from gpu-bundle/, and runs the check.
# bash benchmarks/gpu_check.sh [--parts 1,2] [--seconds 420] [--device cpu] [--out FOLDER]; PYTHON=... chooses a Python.
set -euo pipefail
shopt -s nullglob
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3} bundle=$root/gpu-bundle
export PYTHONPATH=$bundle/site:$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$bundle/site"

install() {  # those wheels of which this Python has no distribution
  local missing
  missing=$("$python" - "$@" <<'EOF'
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
  # shellcheck disable=SC2086
  [ -z "$missing" ] || "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
    --target "$bundle/site" $missing
}

install "$bundle"/wheels/*.whl
halves=("$bundle"/ray-1/*.part "$bundle"/ray-2/*.part)
if [ ${#halves[@]} = 2 ]; then
  wheel=$(mktemp -d)/$(basename "${halves[0]}" .1.part)
  cat "${halves[@]}" > "$wheel"
  install "$wheel" || echo "Ray could not be installed, so part 4 runs without it"
  rm -r "$(dirname "$wheel")"
fi
exec "$python" -m benchmarks.gpu_check "$@"
