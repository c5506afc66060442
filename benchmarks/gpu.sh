#!/usr/bin/env bash
# Everything that must be shown on a machine with one NVIDIA GPU, in one call of at most nine minutes:
#
#     benchmarks/gpu.sh [STAGE...]
#     benchmarks/gpu.sh --rehearse [STAGE...]        the same on a CPU, small; proves the scripts, not the kernels
#
# Stages run in the order below, what decides most first. Each has a limit in seconds, and leaves its rows in RESULTS (default
# benchmarks/results/gpu) as they come. A stage that fails does not stop the others. LIMIT: seconds of the whole call (default 530).
#
#     install      wheels of benchmarks/carry.sh, where DeepSpeed is missing
#     build        the library with CUDA kernels, unless one is there that loads; no kernel spills registers
#     whole        whole_steps.py: 2 ranks share the GPU over NCCL; four layers of Llama-8B, DeepSpeed's and ours in turn
#     parity       nccl.py: 2 ranks share the GPU; a layer and ZeRO-3 against the whole sequence, a trace, what is exposed
#     models       models.py: 4 ranks share the GPU; transformers models with every mode against one rank
#     checks       side by side: exact   the kernels' tests, on the device
#                                race    slow exchanges that begin by writing NaN
#                                sync    a transformers layer makes the host wait for nothing
#                                layer   two processes on the GPU, over gloo, against the whole sequence
#                                ordered the same under torch's sanitizer of streams
#                                one     one rank over NCCL, the package's own communicators, and CUDA graphs
#     host         time of the host
#     emulated     one_gpu.py: rank 0 of 8, Llama-8B, 2K and 8K tokens per GPU
#     bandwidth    against a copy and complex128
#     contention   contention.py: products and attention beside blocks, and what a block waits for
#     whole-1b     as whole, eight layers of a 1B-like model: where the host is the limit
#     convergence  2 ranks share the GPU: loss curves against the noise of training
#     memcheck, initcheck    compute-sanitizer over every kernel, without torch's caching allocator, which hides what lies past a
#                  tensor; the second finds memory that is read and was never written
#
# Several ranks on one GPU: see benchmarks/shared_gpu.py, which says what to install where it can't work.
# Needs nvcc, a C++ compiler, and a Python with torch and transformers.
set -uo pipefail
cd "$(dirname "$0")/.."
wheels=${WHEELS:-.wheels}
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
declare -A limits=([install]=60 [build]=120 [whole]=95 [parity]=70 [models]=85 [checks]=90 [host]=40 [emulated]=90 [bandwidth]=40
    [contention]=50 [whole-1b]=60 [convergence]=90 [memcheck]=60 [initcheck]=60)
stages=(install build whole parity models checks host emulated bandwidth contention whole-1b convergence memcheck initcheck)

device=cuda rehearsed=() patience=1
table=(--megabytes 64 256 --ranks 8 --head-dim 64 128)
trained=(--steps 40 --dtypes bf16 --seq 1024)
if [ "${1:-}" = --rehearse ]; then
    shift
    device=cpu patience=5
    results=${RESULTS:-$work/results}
    table=(--megabytes 1 --ranks 2 4 --heads-per-rank 2 --head-dim 64 80 --repeat 5 --model-dim 256)
    trained=(--steps 2 --dtypes fp32 --skip "sp = 1" "G = 1" "window, kept" "stock, again" "stock, split sums")
    rehearsed=(--rehearse)
    export DS_ACCELERATOR=cpu
else
    results=${RESULTS:-benchmarks/results/gpu}
    export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0}
fi
[ $# -gt 0 ] && stages=("$@")
require=()
[ $device = cuda ] && require=(--require)
export DS_BUILD_OPS=0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
limit=0 # of the stage that runs, counted like SECONDS from the start of this script

run() {
    local left=$((limit - SECONDS))
    if [ $left -le 0 ]; then
        echo "no time left for: $*"
        return 1
    fi
    timeout --kill-after 10 $left "$@"
}

# shared RANKS SCRIPT ARGS...: ranks on this GPU, ended before the stage's time is over
shared() {
    if [ -e "$wheels/libnccl.so.2.xz" ] && [ ! -e "$work/libnccl.so.2" ]; then
        "$python" -c 'import lzma, sys; sys.stdout.buffer.write(lzma.open(sys.argv[1]).read())' "$wheels/libnccl.so.2.xz" > "$work/libnccl.so.2"
    fi
    local preload=${LD_PRELOAD:-}
    [ $device = cuda ] && [ -e "$work/libnccl.so.2" ] && preload=$work/libnccl.so.2
    LD_PRELOAD=$preload run "$python" benchmarks/shared_gpu.py "${rehearsed[@]}" --seconds $((limit - SECONDS - 15)) "$@"
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
    else # --no-deps: what is there already stays as it is
        run "$python" -m pip install -q --no-index --no-deps --no-compile --target "$wheels/site" "$wheels"/*.whl
    fi
}

build() {
    if [ $device = cpu ]; then
        run "$python" csrc/check_cubins.py
    elif run "$python" -c 'import sys; from ds_sp_overlap.relayout import build, kernels
library = kernels.library()
wanted = build.wanted(build.nvcc())["sources"]
sys.exit(not (library.cuda and library.built["sources"] == wanted))'; then
        echo "the kernels that are here load"
    else
        run "$python" -m ds_sp_overlap build cuda && run "$python" csrc/check_cubins.py --require
    fi
}

# side_by_side STAGE...: none of them is timed
side_by_side() {
    local each status=0 pids=()
    for each in "$@"; do
        stage "$each" > "$work/$each.log" 2>&1 &
        pids+=($!)
    done
    for each in "$@"; do
        local result=PASSED
        wait "${pids[0]}" || { result=FAILED && status=1; }
        pids=("${pids[@]:1}")
        echo "--- $each: $result, at $SECONDS s"
        cat "$work/$each.log"
    done
    return $status
}

stage() {
    case $1 in
    install | build) "$1" ;;
    whole) shared 2 benchmarks/whole_steps.py "${rehearsed[@]}" --minutes 1 --out "$results/whole" ;;
    whole-1b) shared 2 benchmarks/whole_steps.py "${rehearsed[@]}" --model 1b --groups 1 2 --minutes 0.6 --out "$results/whole-1b" ;;
    parity) shared 2 benchmarks/nccl.py "${rehearsed[@]}" --first --steps 7 --out "$results" ;;
    models)
        local ranks=4
        [ $device = cpu ] && ranks=2
        shared $ranks benchmarks/models.py "${rehearsed[@]}" --minutes $patience
        ;;
    checks) side_by_side exact race sync layer ordered one ;;
    exact) tests_on_the_device ;;
    layer | one | sync | race) run "$python" benchmarks/on_gpu.py "$1" --device $device ;;
    ordered)
        if [ $device = cpu ]; then echo "a torch without CUDA can't start under it"; else (export TORCH_CUDA_SANITIZER=1 && stage layer); fi
        ;;
    host) LOCAL_RANK=0 run "$python" benchmarks/host.py --steps 100 --out "$results/host" ;;
    emulated)
        run "$python" benchmarks/one_gpu.py "${rehearsed[@]}" --minutes 1 --ranks 8 --transports E2 --models 8b --tokens 8192 2048 \
            --bandwidth 45 --steps 5 --out "$results/emulated"
        ;;
    bandwidth)
        run "$python" benchmarks/kernels.py --device $device --tables moves --out "$results/bandwidth" "${table[@]}" "${require[@]}"
        ;;
    contention) run "$python" benchmarks/contention.py "${rehearsed[@]}" --minutes 0.5 --out "$results/contention" ;;
    convergence) shared 2 benchmarks/convergence/run.py "${trained[@]}" --out "$results/convergence" ;;
    memcheck | initcheck) sanitize "$1" ;;
    *)
        echo "no such stage: $1; there are ${!limits[*]}"
        return 1
        ;;
    esac
}

mkdir -p "$results"
export PYTHONPATH=$PWD/$wheels/site${PYTHONPATH:+:$PYTHONPATH}
log=$work/log
outcomes=()
for name in "${stages[@]}"; do
    limit=$((SECONDS + ${limits[$name]:-90} * patience))
    [ $limit -gt "${LIMIT:-530}" ] && limit=${LIMIT:-530}
    echo "=== $name, at $SECONDS s, ends at $limit s"
    stage "$name" 2>&1 | tee -a "$log"
    if [ "${PIPESTATUS[0]}" = 0 ]; then outcomes+=("PASSED $name"); else outcomes+=("FAILED $name"); fi
done
echo "=== to decide from this call ($device), $SECONDS s"
grep -E '^(rehearsed, means nothing: )?(decide|reached|BLIND)' "$log"
printf '%s\n' "${outcomes[@]}"
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
