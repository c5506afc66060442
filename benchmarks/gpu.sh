#!/usr/bin/env bash
# Everything that must be shown on a machine with one NVIDIA GPU, in four calls of at most nine minutes:
#
#     benchmarks/gpu.sh 1        kernels load and are exact; what kernels cost beside an exchange's blocks
#     benchmarks/gpu.sh 2        streams, waits and transports are right, also without compiled kernels
#     benchmarks/gpu.sh 3        one rank of eight over an emulated network, and a trace of G = 1, 2, 4
#     benchmarks/gpu.sh 4        bandwidth, memory checks, the host, 70B
#     benchmarks/gpu.sh --rehearse 1|2|3|4        the same on a CPU, small; proves the scripts, not the kernels
#
# No call needs another one. Each leaves its rows in RESULTS (default benchmarks/results/gpu) as they come, goes on after a stage
# that fails, and ends with what is to be decided from it. Single stages can be named in place of a number:
#
#     install      wheels of benchmarks/carry.sh, where DeepSpeed is missing
#     build        the library with CUDA kernels, unless one is there that loads; no kernel spills registers
#     exact        the kernels' tests, on the device
#     contention   contention.py: products and attention beside blocks, and what a block waits for
#     race         slow exchanges that begin by writing NaN
#     sync         a transformers layer makes the host wait for nothing
#     layer        two processes on the GPU, over gloo, against the whole sequence
#     ordered      the same under torch's sanitizer of streams
#     nccl         one rank, the package's own communicators
#     emulated     one_gpu.py: rank 0 of 8, Llama-8B, 8K and 32K tokens per GPU
#     bandwidth    against a copy and complex128
#     memcheck, initcheck    compute-sanitizer over every kernel, without torch's caching allocator, which hides what lies past a
#                  tensor; the second finds memory that is read and was never written
#     gemm         projections that write the send buffer themselves
#     host         time of the host
#     emulated-70b one_gpu.py: rank 0 of 8, Llama-70B
#
# Needs nvcc, a C++ compiler, and a Python with torch and transformers.
set -uo pipefail
cd "$(dirname "$0")/.."
wheels=${WHEELS:-.wheels}
python=${PYTHON:-python3}
calls=("install build exact contention" "install build race sync layer ordered nccl" "install build emulated"
    "install build bandwidth memcheck initcheck gemm host emulated-70b")

device=cuda rehearsed=()
table=(--megabytes 64 256 --ranks 8 32 --head-dim 64 128)
if [ "${1:-}" = --rehearse ]; then
    shift
    device=cpu
    results=${RESULTS:-$(mktemp -d)}
    table=(--megabytes 1 --ranks 2 4 --heads-per-rank 2 --head-dim 64 80 --repeat 5 --model-dim 256)
    rehearsed=(--rehearse)
    export DS_ACCELERATOR=cpu
else
    results=${RESULTS:-benchmarks/results/gpu}
    export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0}
fi
require=()
[ $device = cuda ] && require=(--require)

# SECONDS counts from the start of this script: the whole call ends in time, and a stage that would begin late fails at once.
run() {
    local left=$((530 - SECONDS))
    if [ $left -le 0 ]; then
        echo "no time left for: $*"
        return 1
    fi
    timeout $left "$@"
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

install() {
    if "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("deepspeed") is None)'; then
        echo "DeepSpeed is here"
    else
        # --no-deps for DeepSpeed alone: what it needs and is not there yet lies beside it.
        export PIP_BREAK_SYSTEM_PACKAGES=1
        run "$python" -m pip install -q --no-index --find-links "$wheels" einops hjson hypothesis msgpack ninja packaging psutil \
            py-cpuinfo pydantic pytest tabulate tqdm &&
            run "$python" -m pip install -q --no-index --no-deps --find-links "$wheels" deepspeed
    fi
}

build() {
    if [ $device = cpu ]; then
        run "$python" csrc/check_cubins.py
    elif run "$python" -c 'import sys, ds_sp_overlap.relayout.kernels as k; sys.exit(not k.library().cuda)'; then
        echo "the kernels that are here load"
    else
        run "$python" ds_sp_overlap/relayout/build.py cuda && run "$python" csrc/check_cubins.py --require
    fi
}

emulated() {
    run "$python" benchmarks/one_gpu.py "${rehearsed[@]}" --minutes 5 --ranks 8 --transports E2 --models "$@"
}

stage() {
    case $1 in
    install | build) "$1" ;;
    exact) tests_on_the_device ;;
    contention) run "$python" benchmarks/contention.py "${rehearsed[@]}" --out "$results/contention" ;;
    layer | nccl | sync | race) run "$python" benchmarks/on_gpu.py "$1" --device $device ;;
    ordered)
        if [ $device = cpu ]; then echo "a torch without CUDA can't start under it"; else (export TORCH_CUDA_SANITIZER=1 && stage layer); fi
        ;;
    emulated) emulated 8b --tokens 8192 32768 --bandwidth 45 340 --trace --out "$results/emulated" ;;
    emulated-70b) emulated 70b --tokens 8192 32768 --bandwidth 45 340 --out "$results/emulated-70b" ;;
    memcheck | initcheck) sanitize "$1" ;;
    bandwidth)
        run "$python" benchmarks/kernels.py --device $device --tables moves --out "$results/bandwidth" "${table[@]}" "${require[@]}"
        ;;
    gemm) run "$python" benchmarks/kernels.py --device $device --tables gemm --out "$results/gemm" "${table[@]}" ;;
    host) run "$python" benchmarks/host.py --steps 100 --out "$results/host" ;;
    *)
        echo "no such stage: $1; give a call, 1 to ${#calls[@]}, or stages of: ${calls[*]}"
        return 1
        ;;
    esac
}

stages=()
for name in "${@:-1}"; do
    case $name in
    [1-4]) stages+=(${calls[name - 1]}) ;;
    *) stages+=("$name") ;;
    esac
done
mkdir -p "$results"
log=$(mktemp)
outcomes=()
for name in "${stages[@]}"; do
    echo "=== $name, at $SECONDS s"
    stage "$name" 2>&1 | tee -a "$log"
    if [ "${PIPESTATUS[0]}" = 0 ]; then outcomes+=("PASSED $name"); else outcomes+=("FAILED $name"); fi
done
echo "=== to decide from this call ($device)"
grep -E '^(rehearsed, means nothing: )?(decide|reached|BLIND)' "$log"
printf '%s\n' "${outcomes[@]}"
rm "$log"
failed=$(printf '%s\n' "${outcomes[@]}" | sed -n 's/^FAILED //p' | paste -sd ' ')
if [ -n "$failed" ]; then
    echo "FAILED: $failed"
    exit 1
fi
if [ $device = cpu ]; then
    echo "REHEARSED on a CPU: no claim about a kernel or a time: ${stages[*]}"
else
    echo "PASSED: ${stages[*]}"
fi
