#!/bin/bash
# Graphs of parts of a layer by Transformer Engine, FP8 with scales of blocks.
torchrun --nproc-per-node 4 pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 \
    --seq-length 2048 --max-position-embeddings 2048 --swiglu --normalization RMSNorm --disable-bias-linear \
    --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 4 --attention-dropout 0 --hidden-dropout 0 \
    --cuda-graph-impl transformer_engine --cuda-graph-scope attn moe_router moe_preprocess mamba \
    --cuda-graph-warmup-steps 2 --te-rng-tracker --fp8-format e4m3 --fp8-recipe blockwise --bf16 \
    --micro-batch-size 1 --global-batch-size 16 --train-iters 1000 --lr 1e-3 --lr-warmup-iters 10 \
    --mock-data --tokenizer-type NullTokenizer --vocab-size 32000
