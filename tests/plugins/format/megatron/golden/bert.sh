#!/bin/bash
# Another model's program: its flags are read as those of a GPT, which is told.
torchrun --nproc_per_node 8 pretrain_bert.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \
    --seq-length 512 --max-position-embeddings 512 --micro-batch-size 4 --global-batch-size 32 --train-iters 1000000 \
    --weight-decay 1e-2 --clip-grad 1.0 --fp16 --lr 0.0001 --lr-decay-iters 990000 --lr-decay-style linear \
    --min-lr 1.0e-5 --lr-warmup-fraction .01 --bert-no-binary-head --data-path $1 --vocab-file $2 --split 949,50,1
