#!/usr/bin/env bash
# Collects what `benchmarks/gpu.sh` needs on a machine without a network: wheels of a few MiB into WHEELS (default .wheels), and
# CUDA kernels for Hopper that are built here. Run where there is a network, nvcc and torch; then copy the checkout with WHEELS,
# ds_sp_overlap/_kernels.so and ds_sp_overlap/_kernels.json. torch and transformers must be there already.
#
#     benchmarks/carry.sh                 for Python 3.12
set -euo pipefail
cd "$(dirname "$0")/.."
wheels=${WHEELS:-.wheels}
python=${PYTHON:-python3}
export DS_BUILD_OPS=0
"$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$wheels" deepspeed==0.19.8
"$python" -m pip download --quiet --dest "$wheels" --only-binary=:all: --python-version 3.12 \
    --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform any \
    einops hjson hypothesis msgpack ninja packaging psutil py-cpuinfo pydantic pytest tabulate tqdm
if command -v nvcc > /dev/null; then
    TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0} "$python" ds_sp_overlap/relayout/build.py cuda
else
    echo "no nvcc here: the kernels are built there"
fi
du -sh "$wheels"
