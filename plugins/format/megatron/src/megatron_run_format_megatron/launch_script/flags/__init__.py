"""Every known flag of Megatron-LM and what becomes of it here. The documentation's tables are made from this one.

A flag that is not in the table is reported as unknown. Names are those of Megatron's releases up to core 0.16, and of
the scripts among its examples.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from megatron_run.errors.wording import LONGEST_WORD
from megatron_run_format_megatron.launch_script.flags.kinds import (
    Flag,
    Verdict,
    key_flag,
    keys_flag,
    number,
    off,
    on,
    only,
    pair,
    shares,
    whole,
    wholes,
)
from megatron_run_format_megatron.launch_script.flags.without_key import WITHOUT_KEY

_MODEL = (
    key_flag("--num-layers", "model.num_layers", whole),
    key_flag("--hidden-size", "model.hidden_size", whole),
    key_flag("--num-attention-heads", "model.num_heads", whole),
    keys_flag("--group-query-attention", "model.num_kv_heads", on),
    keys_flag("--num-query-groups", "model.num_kv_heads", whole),
    keys_flag("--kv-channels", "model.head_size", whole),
    keys_flag("--qk-layernorm", "model.attention.qk_norm", on),
    keys_flag("--window-size", "model.attention.window", pair),
    keys_flag("--window-attn-skip-freq", "model.attention.window_pattern", only),
    keys_flag("--ffn-hidden-size", "model.ffn_size", whole),
    keys_flag("--tokenizer-type", "model.vocab_size, data.tokenizer", only),
    keys_flag("--vocab-size", "model.vocab_size", whole),
    keys_flag("--padded-vocab-size", "model.vocab_size", whole),
    keys_flag("--tokenizer-model", "model.vocab_size, data.tokenizer", only),
    keys_flag("--vocab-file", "model.vocab_size, data.tokenizer", only),
    keys_flag("--merge-file", "model.vocab_size, data.tokenizer", only),
    keys_flag("--tiktoken-pattern", "data.tokenizer", only),
    keys_flag("--tiktoken-num-special-tokens", "data.tokenizer", whole),
    keys_flag("--tiktoken-special-tokens", "data.tokenizer", list),
    keys_flag("--position-embedding-type", "model.position", only),
    keys_flag("--use-rotary-position-embeddings", "model.position", on),
    keys_flag("--no-position-embedding", "model.position", off, "add_position_embedding"),
    key_flag("--rotary-base", "model.rope.theta", number),
    keys_flag("--rotary-percent", "model.rope.fraction", number),
    keys_flag("--no-rope-freq", "model.rope.pattern", only),
    keys_flag("--use-rope-scaling", "model.rope.scaling", on),
    keys_flag("--rope-scaling-factor", "model.rope.factor", number),
    keys_flag("--rotary-seq-len-interpolation-factor", "model.rope.scaling, model.rope.factor", number),
    keys_flag("--normalization", "model.norm.kind", only),
    key_flag("--norm-epsilon", "model.norm.eps", number),
    keys_flag("--swiglu", "model.activation, model.ffn_size", on),
    keys_flag("--squared-relu", "model.activation", on),
    keys_flag("--openai-gelu", "model.activation", on),
    keys_flag("--no-bias-gelu-fusion", "model.activation", off, "bias_gelu_fusion"),
    keys_flag("--disable-bias-linear", "model.bias", off, "add_bias_linear"),
    keys_flag("--add-qkv-bias", "model.attention.qkv_bias", on),
    keys_flag("--untie-embeddings-and-output-weights", "model.tie_embeddings", on),
    keys_flag("--hidden-dropout", "model.dropout", number),
    keys_flag("--attention-dropout", "model.dropout", number),
    key_flag("--init-method-std", "model.init_std", number),
)
_LATENTS = (
    keys_flag("--multi-latent-attention", "model.use", on),
    keys_flag("--q-lora-rank", "model.query_rank", whole),
    keys_flag("--kv-lora-rank", "model.kv_rank", whole),
    keys_flag("--qk-head-dim", "model.nope_head_size", whole),
    keys_flag("--qk-pos-emb-head-dim", "model.rope_head_size", whole),
    keys_flag("--v-head-dim", "model.value_head_size", whole),
    keys_flag("--rope-type", "model.rope.scaling", only),
    keys_flag("--rotary-scaling-factor", "model.rope.factor, model.attention.scale", number),
    keys_flag("--mscale", "model.rope.attention_factor", number),
    keys_flag("--mscale-all-dim", "model.rope.attention_factor, model.attention.scale", number),
    keys_flag("--mtp-num-layers", "model.mtp_layers", whole),
    keys_flag("--mtp-loss-scaling-factor", "model.mtp_loss_coeff", number),
)
_TRAIN = (
    key_flag("--train-iters", "train.steps", whole),
    key_flag("--train-samples", "train.samples", whole),
    key_flag("--seq-length", "train.sequence_length", whole),
    key_flag("--micro-batch-size", "train.micro_batch_size", whole),
    keys_flag("--global-batch-size", "train.global_batch_size", whole),
    keys_flag("--rampup-batch-size", "train.ramp_up", wholes),
    keys_flag("--calculate-per-token-loss", "train.loss_mean", on),
    keys_flag("--fp16", "train.precision, scaler", on),
    keys_flag("--bf16", "train.precision", on),
    key_flag("--seed", "train.seed", whole),
    key_flag("--lr", "train.lr", number),
    key_flag("--min-lr", "train.min_lr", number),
    keys_flag("--lr-decay-style", "train.lr_shape", only),
    keys_flag("--lr-decay-iters", "train.lr_decay", whole),
    keys_flag("--lr-decay-samples", "train.lr_decay", whole),
    keys_flag("--lr-warmup-fraction", "train.lr_warmup", number),
    keys_flag("--lr-warmup-iters", "train.lr_warmup", whole),
    keys_flag("--lr-warmup-samples", "train.lr_warmup", whole),
    keys_flag("--lr-wsd-decay-style", "train.lr_wsd_shape", only),
    keys_flag("--lr-wsd-decay-iters", "train.lr_wsd", whole),
    keys_flag("--lr-wsd-decay-samples", "train.lr_wsd", whole),
    keys_flag("--weight-decay", "train.weight_decay", number),
    keys_flag("--start-weight-decay", "train.weight_decay", number),
    keys_flag("--end-weight-decay", "train.weight_decay_end", number),
    keys_flag("--weight-decay-incr-style", "train.weight_decay_shape", only),
    key_flag("--clip-grad", "train.clip_norm", number),
    keys_flag("--recompute-granularity", "train.recompute", only),
    keys_flag("--checkpoint-activations", "train.recompute", on),
    keys_flag("--recompute-activations", "train.recompute", on),
    keys_flag("--recompute-modules", "train.recompute", list),
    key_flag("--log-num-zeros-in-grad", "train.count_zeros", on),
)
_PLUGINS = (
    keys_flag("--loss-scale", "scaler.use, scaler.loss_scale", number),
    keys_flag("--initial-loss-scale", "scaler.initial_loss_scale", number),
    keys_flag("--min-loss-scale", "scaler.min_loss_scale", number),
    keys_flag("--loss-scale-window", "scaler.loss_scale_window", number),
    keys_flag("--hysteresis", "scaler.hysteresis", whole),
    keys_flag("--use-distributed-optimizer", "optimizer.use", on),
    keys_flag("--optimizer", "optimizer.rule", only),
    keys_flag("--adam-beta1", "optimizer.betas", number),
    keys_flag("--adam-beta2", "optimizer.betas", number),
    key_flag("--adam-eps", "optimizer.eps", number),
    keys_flag("--sgd-momentum", "optimizer.momentum", number),
    keys_flag("--muon-momentum", "optimizer.momentum", number),
    keys_flag("--decoupled-lr", "optimizer.lr_mult", number),
    keys_flag("--grad-reduce-in-bf16", "optimizer.grad_dtype", on),
    key_flag("--optimizer-cpu-offload", "optimizer.state_on_host", on),
    key_flag("--ddp-bucket-size", "optimizer.bucket_size", whole),
    keys_flag("--mock-data", "data.use", on),
    keys_flag("--data-path", "data.paths, data.weights", list),
    keys_flag("--split", "data.split", shares),
    keys_flag("--data-cache-path", "data.cache", only),
    keys_flag("--reset-position-ids", "data.reset_positions", on),
    keys_flag("--reset-attention-mask", "data.reset_attention", on),
    keys_flag("--eod-mask-loss", "data.mask_end", on),
)
_LAYERS = (
    keys_flag("--transformer-impl", "parallel-layer.use", only),
    keys_flag("--fp8-format", "parallel-layer.fp8, parallel-layer.fp8_format", only),
    keys_flag("--fp8-recipe", "parallel-layer.fp8", only),
    keys_flag("--fp8-margin", "parallel-layer.fp8_margin", whole),
    keys_flag("--fp8-amax-history-len", "parallel-layer.fp8_amax_history", whole),
    keys_flag("--fp8-amax-compute-algo", "parallel-layer.fp8_amax", only),
    keys_flag("--cuda-graph-impl", "graph-capture.use", only),
    keys_flag("--enable-cuda-graph", "graph-capture.use", on),
    keys_flag("--external-cuda-graph", "graph-capture.use", on),
    keys_flag("--cuda-graph-scope", "graph-capture.scope", list),
    keys_flag("--cuda-graph-modules", "graph-capture.scope", list, "cuda_graph_scope"),
    keys_flag("--cuda-graph-warmup-steps", "graph-capture.capture_after", whole),
)
_PARALLEL = (
    keys_flag("--tensor-model-parallel-size", "parallel.tensor, parallel-layer.use", whole),
    keys_flag("--pipeline-model-parallel-size", "parallel.pipeline, schedule.use", whole),
    keys_flag("--num-layers-per-virtual-pipeline-stage", "parallel.chunks, schedule.use", whole),
    keys_flag("--num-virtual-stages-per-pipeline-rank", "parallel.chunks, schedule.use", whole),
    keys_flag("--microbatch-group-size-per-virtual-pipeline-stage", "schedule.group_size", whole),
    keys_flag("--sequence-parallel", "parallel.sequence", on),
    keys_flag("--context-parallel-size", "parallel.context, parallel-layer.use", whole),
    keys_flag("--cp-comm-type", "parallel-layer.method", list),
    key_flag("--decoder-first-pipeline-num-layers", "parallel.first_stage_layers", whole),
    key_flag("--decoder-last-pipeline-num-layers", "parallel.last_stage_layers", whole),
    key_flag("--account-for-embedding-in-pipeline-split", "parallel.embedding_as_layer", on),
    key_flag("--account-for-loss-in-pipeline-split", "parallel.loss_as_layer", on),
)
_EXPERTS = (
    keys_flag("--num-experts", "model.experts.count", whole),
    key_flag("--moe-router-topk", "model.experts.top_k", whole),
    key_flag("--moe-ffn-hidden-size", "model.experts.ffn_size", whole),
    keys_flag("--moe-layer-freq", "model.experts.layer_freq, model.experts.layer_pattern", only),
    key_flag("--moe-router-score-function", "model.experts.router.score_function", only),
    key_flag("--moe-router-pre-softmax", "model.experts.router.pre_softmax", on),
    key_flag("--moe-router-topk-scaling-factor", "model.experts.router.scaling_factor", number),
    key_flag("--moe-router-num-groups", "model.experts.router.groups", whole),
    keys_flag("--moe-router-group-topk", "model.experts.router.top_groups, model.experts.router.group_best", whole),
    keys_flag("--moe-router-enable-expert-bias", "model.experts.router.bias_rate", on),
    keys_flag("--moe-router-bias-update-rate", "model.experts.router.bias_rate", number),
    keys_flag("--moe-router-load-balancing-type", "model.experts.aux_loss_coeff", only),
    keys_flag("--moe-aux-loss-coeff", "model.experts.aux_loss_coeff", number),
    key_flag("--moe-z-loss-coeff", "model.experts.z_loss_coeff", number),
    key_flag("--moe-expert-capacity-factor", "model.experts.capacity_factor", number),
    key_flag("--moe-token-drop-policy", "model.experts.drop_policy", only),
    key_flag("--moe-pad-expert-input-to-capacity", "model.experts.pad_to_capacity", on),
    key_flag("--moe-shared-expert-intermediate-size", "model.experts.shared.ffn_size", whole),
    key_flag("--moe-shared-expert-gate", "model.experts.shared.gate", on),
    keys_flag("--moe-token-dispatcher-type", "model.experts.dispatcher", only),
    keys_flag("--expert-model-parallel-size", "parallel.expert", whole),
)
_RUN = (
    keys_flag("--save", "run.folder", only),
    keys_flag("--save-interval", "checkpoint.interval", whole),
    key_flag("--async-save", "checkpoint.async_save", on),
    key_flag("--check-weight-hash-across-dp-replicas-interval", "guard.replica_interval", whole),
    keys_flag("--exit-duration-in-mins", "run.time_limit", whole),
    keys_flag("--distributed-timeout-minutes", "run.timeout", whole),
    key_flag("--deterministic-mode", "run.deterministic", on),
    key_flag("--eval-interval", "eval.interval", whole),
    keys_flag("--eval-iters", "eval.batches", whole),
)
#: All flags; the first that matches a name decides.
FLAGS = (*_MODEL, *_LATENTS, *_TRAIN, *_PLUGINS, *_LAYERS, *_PARALLEL, *_EXPERTS, *_RUN, *WITHOUT_KEY)


#: The names of flags that decide what is learned.
_DECIDING = [flag.name for flag in FLAGS if flag.verdict in (Verdict.TAKEN, Verdict.DIFFERS) and "*" not in flag.name]


def find(name: str) -> Flag | None:
    """The flag ``name``, in which ``_`` counts as ``-``; None where it is unknown.

    A pattern such as ``--moe-*`` must not swallow the misspelt name of a flag that decides what is learned: a name that
    is one typing error away from such a flag is unknown.
    """
    wanted = name.replace("_", "-")
    found = next((flag for flag in FLAGS if fnmatchcase(wanted, flag.name)), None)
    slip = found is not None and "*" in found.name and any(_errors(wanted, known) <= 1 for known in _DECIDING)
    return None if slip else found


def near(name: str) -> str | None:
    """The known flag that ``name`` may be a misspelling of: at most one typing error in eight letters; else None."""
    wanted = name.replace("_", "-")
    errors, known = min((_errors(wanted, flag.name), flag.name) for flag in FLAGS if "*" not in flag.name)
    return known if errors <= len(wanted) // 8 and len(wanted) <= LONGEST_WORD else None


def _errors(name: str, known: str) -> int:
    """How many letters are to be inserted, removed or replaced to make ``known`` of ``name`` (Levenshtein).

    At least so many as one is longer than the other, which is the answer for a word of absurd length.
    """
    if len(name) > LONGEST_WORD:
        return len(name) - len(known)
    row = list(range(len(known) + 1))
    for count, letter in enumerate(name, 1):
        before, row = row, [count]
        for place, other in enumerate(known, 1):
            row.append(min(before[place] + 1, row[-1] + 1, before[place - 1] + (letter != other)))
    return row[-1]
