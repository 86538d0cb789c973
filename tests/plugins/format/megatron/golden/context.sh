torchrun --nproc-per-node 8 pretrain_gpt.py \
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 \
    --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --train-iters 4 \
    --mock-data --vocab-size 128 --tokenizer-type NullTokenizer \
    --context-parallel-size 2 --cp-comm-type a2a --tensor-model-parallel-size 2 --sequence-parallel
