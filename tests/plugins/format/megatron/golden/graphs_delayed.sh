#!/bin/bash
# Delayed scales and graphs exclude each other here.
python -m torch.distributed.run --nproc-per-node 2 pretrain_gpt.py --num-layers 4 --hidden-size 512 \
    --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 --cuda-graph-impl local \
    --fp8-format hybrid --fp8-margin 1 --fp8-interval 1 --tensor-model-parallel-size 2 --sequence-parallel --bf16 \
    --micro-batch-size 2 --global-batch-size 8 --train-iters 100 --lr 1e-3 --mock-data --vocab-size 1024
