#!/usr/bin/env bash
# Everything that must be shown on a machine with one NVIDIA GPU, in one command:
#
#     benchmarks/gpu.sh [STAGE ...]               all of the stages below, or those named
#     benchmarks/gpu.sh --rehearse [STAGE ...]    the same on a CPU, small; proves the scripts, not the kernels
#
#     build        the library with CUDA kernels; no kernel spills registers
#     exact        the kernels' tests, on the device
#     memcheck     compute-sanitizer over every kernel, without torch's caching allocator, which hides what lies past a tensor
#     initcheck    the same for memory that is read and was never written
#     bandwidth    against a copy and complex128
#     gemm         projections that write the send buffer themselves
#     layer        two processes on the GPU, over gloo, against the whole sequence
#     ordered      the same under torch's sanitizer of streams
#     nccl         one rank, the package's own communicators
#     sync         a transformers layer makes the host wait for nothing
#     race         slow exchanges that begin by writing NaN
#     host         time of the host
#     emulated-7b, emulated-70b    one_gpu.py: an emulated network
#
# Each stage ends within nine minutes, and leaves its rows in RESULTS (default benchmarks/results/gpu) as they come. Every
# stage runs even if one before it failed; the last line says which did. Needs nvcc, a C++ compiler and a Python with torch.
# To a machine without a network carry the wheels beside it:
#
#     benchmarks/gpu.sh carry                     where there is a network: WHEELS (default .wheels) for Python 3.12
#     benchmarks/gpu.sh install build exact ...   there
set -uo pipefail
cd "$(dirname "$0")/.."
wheels=${WHEELS:-.wheels}
deepspeed=deepspeed==0.19.8
packages=(transformers hypothesis pytest tabulate einops hjson msgpack ninja packaging psutil py-cpuinfo pydantic tqdm)
stages=(build exact memcheck initcheck bandwidth gemm layer ordered nccl sync race host emulated-7b emulated-70b)
python=${PYTHON:-python3}

device=cuda results=${RESULTS:-benchmarks/results/gpu} small=() emulated=(--minutes 6)
if [ "${1:-}" = --rehearse ]; then
    shift
    device=cpu results=${RESULTS:-$(mktemp -d)}
    small=(--megabytes 1 --ranks 2 4 --heads-per-rank 2 --head-dim 64 80 --repeat 5 --model-dim 256)
    emulated+=(--rehearse)
    export DS_ACCELERATOR=cpu
fi
require=()
[ $device = cuda ] && require=(--require)

run() {
    timeout 530 "$@"
}

tests_on_the_device() {
    # Skipped tests would be blindness: on a GPU the device tests must have run.
    run "$python" - "$device" <<'PY'
import sys
import pytest

class Ran:
    names = []
    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            self.names.append(report.nodeid)

status = pytest.main(["-q", "-p", "no:cacheprovider", "tests/unit/test_kernels.py"], plugins=[ran := Ran()])
on_device = [name for name in ran.names if "device" in name or "current_stream" in name]
print(f"{len(ran.names)} tests passed, {len(on_device)} of them on or about the device")
sys.exit(status or (sys.argv[1] == "cuda" and not any("test_moves_on_the_device" in name for name in on_device)))
PY
}

sanitize() {
    local watched=("$python" benchmarks/kernels.py --exercise --device $device)
    if [ $device = cpu ]; then
        run "${watched[@]}"
    elif ! command -v compute-sanitizer > /dev/null; then
        echo "compute-sanitizer: NOT FOUND"
        return 1
    else
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 run compute-sanitizer --tool "$1" --error-exitcode 9 "${watched[@]}"
    fi
}

stage() {
    case $1 in
    carry)
        "$python" -m pip wheel -q --no-deps --wheel-dir "$wheels" "$deepspeed" &&
            "$python" -m pip download -q --dest "$wheels" --only-binary=:all: --python-version 3.12 \
                --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform any "${packages[@]}" && ls "$wheels"
        ;;
    install)
        "$python" -m pip install -q --no-index --find-links "$wheels" "${packages[@]}" &&
            "$python" -m pip install -q --no-index --no-deps --find-links "$wheels" "$deepspeed"
        ;;
    build)
        if [ $device = cpu ]; then run "$python" csrc/check_cubins.py
        else run "$python" ds_sp_overlap/relayout/build.py cuda && run "$python" csrc/check_cubins.py --require; fi
        ;;
    exact) tests_on_the_device ;;
    memcheck | initcheck) sanitize "$1" ;;
    bandwidth)
        run "$python" benchmarks/kernels.py --device $device --tables moves --out "$results/bandwidth" "${small[@]}" "${require[@]}"
        ;;
    gemm) run "$python" benchmarks/kernels.py --device $device --tables gemm --out "$results/gemm" "${small[@]}" ;;
    layer | nccl | sync | race) run "$python" benchmarks/on_gpu.py "$1" --device $device ;;
    ordered)  # a torch without CUDA can't start under it
        if [ $device = cpu ]; then stage layer; else (export TORCH_CUDA_SANITIZER=1 && stage layer); fi
        ;;
    host) run "$python" benchmarks/host.py --steps 100 --out "$results/host" ;;
    emulated-*) run "$python" benchmarks/one_gpu.py --models "${1#emulated-}" "${emulated[@]}" --out "$results/$1" ;;
    *)
        echo "no such stage; there are: install ${stages[*]}, and carry"
        return 1
        ;;
    esac
}

[ $# -eq 0 ] && set -- "${stages[@]}"
failed=()
for name in "$@"; do
    echo "=== $name"
    stage "$name" || failed+=("$name")
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "FAILED: ${failed[*]}"
    exit 1
fi
if [ $device = cpu ]; then echo "REHEARSED on a CPU: no claim about a kernel or a time: $*"; else echo "PASSED: $*"; fi
