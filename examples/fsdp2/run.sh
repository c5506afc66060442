#!/usr/bin/env bash
# run.sh [MODEL GPUS [ARGUMENT...]]: train with the overlap off and on and compare. Without arguments: a tiny model on two CPU ranks.
set -euo pipefail
cd "$(dirname "$0")"
dtype=bf16
if [ $# -eq 0 ]; then export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1; dtype=fp32; fi
out=$(mktemp -d)
for overlap in off on; do
    torchrun --standalone --nproc_per_node "${2:-2}" train.py --model "${1:-tiny}" --overlap $overlap "${@:3}" \
        > "$out/$overlap.log" 2>&1 || { tail -n 60 "$out/$overlap.log"; exit 1; }
done
python ../compare.py "$out/off.log" "$out/on.log" --dtype $dtype
