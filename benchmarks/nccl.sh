#!/usr/bin/env bash
# Everything that needs 2 to 8 GPUs of one node, in ten minutes:
#
#     benchmarks/nccl.sh [GPUS]               all GPUs of this machine, or so many
#     benchmarks/nccl.sh --rehearse [RANKS]   the same over gloo on a CPU, small; proves the scripts, not the kernels
#
# First parity with the unsharded layer, by both transports and under ZeRO-3, and a trace that shows in which order exchanges start.
# Then what is exposed, with launch order on and off and 1, 8 and 32 hardware queues: CUDA and NCCL read both as a process starts.
# A collective that hangs fails after --timeout seconds (nccl.py), a setting after LIMIT. Rows, traces and the table that is printed
# at the end lie in RESULTS (default benchmarks/results/nccl).
set -uo pipefail
cd "$(dirname "$0")/.."
limit=${LIMIT:-145}
rehearsed=()
if [ "${1:-}" = --rehearse ]; then
    shift
    ranks=${1:-2}
    results=${RESULTS:-$(mktemp -d)}
    rehearsed=(--rehearse)
    export DS_ACCELERATOR=cpu
else
    ranks=${1:-$(nvidia-smi --list-gpus | wc -l)}
    results=${RESULTS:-benchmarks/results/nccl}
fi
mkdir -p "$results"
failed=()
first=(--first)
# Launch order, hardware queues. The settings that the docs ask for come first.
for setting in "1 8" "0 8" "1 1" "1 32"; do
    read -r order queues <<< "$setting"
    echo "=== NCCL_LAUNCH_ORDER_IMPLICIT=$order CUDA_DEVICE_MAX_CONNECTIONS=$queues, $ranks ranks"
    NCCL_LAUNCH_ORDER_IMPLICIT=$order CUDA_DEVICE_MAX_CONNECTIONS=$queues OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} \
        timeout "$limit" "${PYTHON:-python3}" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
        benchmarks/nccl.py "${rehearsed[@]}" "${first[@]}" --out "$results" || failed+=("$setting")
    first=()
done
"${PYTHON:-python3}" benchmarks/nccl.py --table "$results"
if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAILED with launch order and queues: %s\n' "${failed[@]}"
    exit 1
fi
