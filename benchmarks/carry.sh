#!/usr/bin/env bash
# Collects what `benchmarks/gpu.sh` needs on a machine without a network: wheels of a few MiB and an NCCL that lets ranks share a GPU,
# stripped to Hopper's code (14 MiB), into WHEELS (default .wheels); and CUDA kernels for Hopper that are built here. Run where there
# is a network and nvcc, with the Python of an environment that has this package (`make .venv/ready`); then copy the checkout with
# WHEELS, ds_sp_overlap/_kernels.so and ds_sp_overlap/_kernels.json. torch with CUDA 13 and transformers must be there already.
#
#     benchmarks/carry.sh                 for Python 3.12
set -euo pipefail
cd "$(dirname "$0")/.."
wheels=${WHEELS:-.wheels}
python=${PYTHON:-.venv/bin/python}
nccl=$(mktemp -d)
trap 'rm -rf "$nccl"' EXIT
export DS_BUILD_OPS=0
"$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$wheels" deepspeed==0.19.8
there=(--quiet --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 --platform manylinux_2_18_x86_64
    --platform manylinux2014_x86_64 --platform any)
"$python" -m pip download "${there[@]}" --dest "$wheels" einops hjson hypothesis msgpack ninja packaging psutil py-cpuinfo pydantic pytest \
    tabulate tqdm wrapt
if [ ! -e "$wheels/libnccl.so.2.xz" ]; then
    "$python" -m pip install "${there[@]}" --no-deps --target "$nccl" nvidia-nccl-cu13==2.30.7
    "$python" benchmarks/strip_nccl.py "$nccl/nvidia/nccl/lib/libnccl.so.2" "$wheels/libnccl.so.2.xz"
fi
if command -v nvcc > /dev/null; then
    TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0} "$python" -m ds_sp_overlap build cuda
else
    echo "no nvcc here: the kernels are built there"
fi
du -sh "$wheels"
