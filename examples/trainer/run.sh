#!/usr/bin/env bash
# run.sh [MODEL GPUS [ARGUMENT...]]: train with the overlap off and on and compare. Without arguments: a tiny model on two CPU ranks.
# CONFIG=longer.json run.sh ...: the same with less memory, for longer sequences.
set -euo pipefail
cd "$(dirname "$0")"
dtype=bf16
if [ $# -eq 0 ]; then export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1; dtype=fp32; fi
out=$(mktemp -d)
for overlap in 0 1; do
    export DS_SP_OVERLAP=$overlap # goes before what ds.json says
    torchrun --standalone --nproc_per_node "${2:-2}" train.py --model "${1:-tiny}" --deepspeed "${CONFIG:-ds.json}" --output "$out/$overlap" "${@:3}" \
        > "$out/$overlap.log" 2>&1 || { tail -n 60 "$out/$overlap.log"; exit 1; }
    cat "$out/$overlap/trainer_state.json" >> "$out/$overlap.log" # all digits of the losses
done
python ../compare.py "$out/0.log" "$out/1.log" --dtype $dtype
