#!/usr/bin/env bash
# run.sh [MODEL GPUS [ARGUMENT...]]: train Megatron-DeepSpeed's own pretrain_gpt.py, unedited, with the overlap off and on and compare.
# MODEL: tiny, 1.3b or 7b. Without arguments: tiny on two CPU ranks, with stand-ins for what Megatron-DeepSpeed wants of a GPU.
#
#   git clone https://github.com/deepspeedai/Megatron-DeepSpeed && git -C Megatron-DeepSpeed checkout 4efb479d
#   pip install six pillow pybind11          # and flash-attn on GPUs
#   MEGATRON_DEEPSPEED=$PWD/Megatron-DeepSpeed ./run.sh
set -euo pipefail
checkout=$(realpath "${MEGATRON_DEEPSPEED:?names no checkout: see the first lines of $0}")
cd "$(dirname "$0")"
case ${1:-tiny} in
    tiny) model="--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 256 --init-method-std 0.2" ;;
    1.3b) model="--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 32768" ;;
    7b) model="--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 65536" ;;
    *) echo "run.sh: no model $1: tiny, 1.3b or 7b" >&2; exit 2 ;;
esac
dtype=bf16
export PYTHONPATH=$checkout${PYTHONPATH:+:$PYTHONPATH} CUDA_DEVICE_MAX_CONNECTIONS=8 LOCAL_SIZE=${2:-2}
if [ $# -eq 0 ]; then
    export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 MEGATRON_ON_CPU=flash dtype=fp32
    export PYTHONPATH=$PWD/../../tests/harness/megatron_on_cpu:$PYTHONPATH
fi
out=$(mktemp -d)
python corpus.py "$out/corpus" > "$out/corpus.log" 2>&1 || { cat "$out/corpus.log"; exit 1; }
for overlap in 0 1; do
    export DS_SP_OVERLAP=$overlap # goes before what ds.json says
    torchrun --standalone --nproc_per_node "$LOCAL_SIZE" -m ds_sp_overlap run "$checkout/pretrain_gpt.py" \
        --deepspeed --deepspeed_config ds.json --ds-sequence-parallel-size "$LOCAL_SIZE" --no-pipeline-parallel --zero-stage 1 \
        --use-flash-attn-v2 $model --max-position-embeddings 65536 --use-rotary-position-embeddings \
        --attention-dropout 0 --hidden-dropout 0 --no-masked-softmax-fusion --no-query-key-layer-scaling \
        --no-gradient-accumulation-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion \
        --micro-batch-size 1 --global-batch-size 1 --lr 1e-3 --lr-decay-style constant --train-iters 20 --log-interval 1 \
        --eval-interval 1000 --eval-iters 0 --data-path "$out/corpus" --split 90,10,0 \
        --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0 \
        $([ $dtype = bf16 ] && echo --bf16 || echo --distributed-backend gloo) \
        "${@:3}" > "$out/$overlap.log" 2>&1 || { tail -n 60 "$out/$overlap.log"; exit 1; }
done
python ../compare.py "$out/0.log" "$out/1.log" --dtype $dtype
