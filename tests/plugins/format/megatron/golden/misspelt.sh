#!/bin/bash
# Slips: near ones are asked about, far ones are not.
python pretrain_gpt.py --num-layer 2 --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 \
    --train-iters 4 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --lr=1e-4 --moe-aux-loss-coef 0.1 \
    --out-seq-length 9 --my-own-flag x --mock-data --optimizer sgd --sgd-momentum 0.8 --hysteresis 4 --vocab-size 128
