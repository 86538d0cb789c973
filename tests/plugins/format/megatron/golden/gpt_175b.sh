#!/bin/bash
# A large GPT over tensor and pipeline ranks; folders come as arguments.
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=16
CHECKPOINTS=$1
LAUNCH=(--nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES --master_addr ${MASTER:-localhost} --master_port 6000)
MODEL=(
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96
    --seq-length 2048 --max-position-embeddings 2048 --attention-backend auto   # or flash
)
TRAINING=(
    --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 --train-iters 500000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0
    --fp16 --loss-scale-window 500
    --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000
)
DATA=(--data-path $2 --vocab-file $3 --merge-file $4 --split 949,50,1)
OUT=(--log-interval 100 --save-interval 10000 --save $CHECKPOINTS --load $CHECKPOINTS --eval-interval 1000 --eval-iters 10
    --tensorboard-dir $5)
torchrun ${LAUNCH[@]} pretrain_gpt.py \
    ${MODEL[@]} \
    ${TRAINING[@]} \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 \
    ${DATA[@]} \
    ${OUT[@]}
