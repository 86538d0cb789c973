#!/bin/bash
# Latent attention with YaRN, routers in groups, two predicted tokens; and what has no key yet.
OPTIONS=(
    --num-layers 28 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 --max-position-embeddings 4096
    --multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
    --qk-layernorm --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 --position-embedding-type rope
    --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
    --num-experts 64 --moe-layer-freq '([0]+[1]*27)' --moe-router-topk 6 --moe-ffn-hidden-size 1408
    --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5 --moe-router-enable-expert-bias
    --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-shared-expert-intermediate-size 2816
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3 --moe-router-dtype fp32
    --moe-token-dispatcher-type flex --moe-enable-deepep --moe-permute-fusion --mtp-num-layers 1
    --mtp-loss-scaling-factor 0.1 --first-last-layers-bf16
    --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 1 --global-batch-size 512 --train-samples 100000
    --lr 4.2e-4 --lr-decay-style WSD --lr-wsd-decay-samples 10000 --lr-wsd-decay-style cosine --lr-warmup-samples 2000
    --bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --optimizer-cpu-offload
    --expert-model-parallel-size 8 --use-distributed-optimizer --mock-data --tokenizer-type TikTokenizer
    --tokenizer-model /models/tok.json --tiktoken-num-special-tokens 1000
)
torchrun --nproc-per-node 8 pretrain_gpt.py ${OPTIONS[@]}
