#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=8
# srun starts the ranks; the options are one string.
OPTIONS=" \
    --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 \
    --squared-relu --kv-channels 128 --normalization LayerNorm --apply-layernorm-1p --no-bias-gelu-fusion \
    --micro-batch-size 2 --global-batch-size 256 --train-samples 100000 --lr 3e-4 --min-lr 3e-5 --bf16"
OPTIONS="$OPTIONS --lr-decay-samples 90000 --lr-warmup-samples 1000 --lr-decay-style cosine --weight-decay 0.1 \
    --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model /models/sp.model --data-path 0.7 /data/a 0.3 /data/b \
    --deterministic-mode --async-save --save runs/slurm --save-interval 200 --log-progress --timing-log-option minmax"
srun --ntasks-per-node 8 --nodes 4 --output=%x.log bash -c "cd /repo; python -u pretrain_gpt.py ${OPTIONS}"
