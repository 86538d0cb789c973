#!/bin/bash
# Heads of a size of their own with norms and biases, windows and layers without positions, part of a head rotating.
MODEL=(
    --num-layers 12 --hidden-size 768 --num-attention-heads 8 --kv-channels 128
    --group-query-attention --num-query-groups 2 --ffn-hidden-size 3072 --squared-relu
    --disable-bias-linear --add-qkv-bias --qk-layernorm --normalization RMSNorm
    --window-size '(511, 0)' --window-attn-skip-freq 4 --no-rope-freq '([0]*3+[1]*1)*3'
    --use-rotary-position-embeddings --rotary-percent 0.5 --rotary-seq-len-interpolation-factor 2
    --seq-length 2048 --max-position-embeddings 2048 --untie-embeddings-and-output-weights
)
torchrun --nproc-per-node 2 pretrain_gpt.py "${MODEL[@]}" --hidden-dropout 0 --attention-dropout 0 \
    --micro-batch-size 2 --global-batch-size 64 --train-iters 2000 --lr 3e-4 --bf16 --mock-data \
    --tokenizer-type NullTokenizer --vocab-size 32000 --mtp-num-layers 1 --qk-head-dim 64
