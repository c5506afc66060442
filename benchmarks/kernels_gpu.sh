#!/usr/bin/env bash
# Everything the kernels must show on a machine with an NVIDIA GPU, in one command:
#
#     benchmarks/kernels_gpu.sh [RESULTS]        default: benchmarks/results/kernels
#     benchmarks/kernels_gpu.sh --rehearse       the same steps on a CPU, small and labelled so; proves the script, not the kernels
#
# Builds, checks exactness on the device, runs compute-sanitizer's memcheck and racecheck, measures bandwidth against the
# thresholds. Every step runs even if one before it failed; the last lines say which did. Needs nvcc, a C++ compiler and a
# Python with torch, pytest and hypothesis; DeepSpeed is not needed.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
device=cuda results=benchmarks/results/kernels
sizes=()
if [ "${1:-}" = --rehearse ]; then
    device=cpu results=${2:-benchmarks/results/kernels-cpu}
    sizes=(--device cpu --megabytes 1 --ranks 2 4 --heads-per-rank 2 --head-dim 64 80 --repeat 5 --model-dim 256)
elif [ $# -gt 0 ]; then
    results=$1
fi

failed=()
step() {
    local name=$1
    shift
    echo "=== $name"
    "$@" || failed+=("$name")
}

exactness() {
    # Skipped tests would be blindness: on a GPU the device tests must have run.
    $python - "$device" <<'PY'
import sys
import benchmarks.kernels  # stands in for the package's __init__ where DeepSpeed is missing
import pytest

class Ran:
    names = []
    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            self.names.append(report.nodeid)

status = pytest.main(["-q", "-p", "no:cacheprovider", "tests/unit/test_kernels.py"], plugins=[ran := Ran()])
on_device = sum("device" in name or "current_stream" in name for name in ran.names)
print(f"{len(ran.names)} tests passed, {on_device} of them on or about the device")
sys.exit(status or (sys.argv[1] == "cuda" and not any("test_moves_on_the_device" in name for name in ran.names)))
PY
}

sanitize() {
    if ! command -v compute-sanitizer > /dev/null; then
        echo "compute-sanitizer: NOT FOUND"
        return 1
    fi
    compute-sanitizer --tool "$1" --error-exitcode 9 "$python" benchmarks/kernels.py --exercise --device cuda
}

step build "$python" ds_sp_overlap/relayout/build.py cuda
step cubins "$python" csrc/check_cubins.py --require
step exactness exactness
if [ $device = cuda ]; then
    step memcheck sanitize memcheck
    step racecheck sanitize racecheck
else
    echo "=== rehearsal on a CPU: memcheck and racecheck need a GPU and did not run"
    step exercise "$python" benchmarks/kernels.py --exercise --device cpu
fi
require=()
[ $device = cuda ] && require=(--require)
step bandwidth "$python" benchmarks/kernels.py --out "$results" "${sizes[@]}" "${require[@]}"

if [ ${#failed[@]} -gt 0 ]; then
    echo "FAILED: ${failed[*]}"
    exit 1
fi
echo "PASSED on $device: every step"
