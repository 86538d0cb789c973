#!/bin/bash
# Interleaved stages and sequence parallelism; a tokenizer by its name.
NODES=8
GPUS=8
WORLD=$((NODES * GPUS))
ARGS=(
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64
    --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 131072
    --position-embedding-type rope --rotary-base 500000 --use-rope-scaling --swiglu --normalization RMSNorm
    --norm-epsilon 1e-5 --untie-embeddings-and-output-weights --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0 --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model meta-llama/Llama-3.1-70B
    --micro-batch-size 1 --global-batch-size $((WORLD * 16)) --train-samples 2000000 --lr 1.5e-4 --min-lr 1e-5
    --lr-decay-style cosine --lr-warmup-samples 10000 --weight-decay 0.1 --clip-grad 1.0 --bf16
    --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4
    --num-layers-per-virtual-pipeline-stage 5 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --tp-comm-overlap --recompute-activations --data-path /data/text_document --split 99,1,0
    --save runs/70b --save-interval 500 --eval-iters 0 --wandb-project llama --wandb-exp-name 70b
)
torchrun --nproc-per-node=$GPUS --nnodes=$NODES --node-rank=$RANK --rdzv-endpoint=$HEAD:29500 --rdzv-backend=c10d \
    pretrain_gpt.py "${ARGS[@]}"
