#!/usr/bin/env bash
# Downloads into gpu-bundle/ what a machine with Python 3.12, CUDA and torch lacks to run benchmarks/gpu_check.sh:
# wheels/ (below 10 MB), and Ray's wheel in two halves, ray-1/ and ray-2/. PYTHON is a Python with pip.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf gpu-bundle
mkdir -p gpu-bundle/wheels gpu-bundle/ray-1 gpu-bundle/ray-2
versions() { grep -iE "^($1)==" constraints.txt; }
needed='hydra-core|omegaconf|pydantic|pydantic_core|annotated-types|typing-inspection|jaxtyping|wadler_lindig'
rays='jsonschema|jsonschema-specifications|referencing|rpds-py|attrs|click|msgpack|requests|idna|certifi|urllib3|charset-normalizer'
target=(--python-version 3.12 --implementation cp)
for glibc in 28 27 17 12 5; do target+=(--platform "manylinux_2_${glibc}_x86_64"); done
target+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64 --only-binary=:all:)
# shellcheck disable=SC2046
"$PYTHON" -m pip download --quiet --no-deps "${target[@]}" --dest gpu-bundle/wheels $(versions "$needed|$rays")
"$PYTHON" -m pip wheel --quiet --no-deps --wheel-dir gpu-bundle/wheels "$(versions antlr4-python3-runtime)"
"$PYTHON" -m pip download --quiet --no-deps "${target[@]}" --dest gpu-bundle "$(versions ray)"
wheel=$(basename gpu-bundle/ray-*.whl)
size=$(stat -c %s "gpu-bundle/$wheel")
head -c $((size / 2)) "gpu-bundle/$wheel" > "gpu-bundle/ray-1/$wheel.1.part"
tail -c +$((size / 2 + 1)) "gpu-bundle/$wheel" > "gpu-bundle/ray-2/$wheel.2.part"
rm "gpu-bundle/$wheel"
du -sh gpu-bundle/*
