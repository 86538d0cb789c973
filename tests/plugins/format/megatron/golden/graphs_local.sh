#!/bin/bash
# Older flags for graphs, and more flags from outside.
BASE="--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048"
torchrun --nproc-per-node 2 pretrain_gpt.py $BASE --enable-cuda-graph --cuda-graph-scope full_iteration \
    --tensor-model-parallel-size 2 --transformer-impl local --no-fp8-wgrad --bf16 --micro-batch-size 2 \
    --global-batch-size 8 --train-iters 100 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 255 $@
