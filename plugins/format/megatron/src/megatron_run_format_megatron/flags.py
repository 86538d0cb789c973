"""Every known flag of Megatron-LM and what becomes of it here. The documentation's tables are made from this one.

A flag that is not in the table is reported as unknown. Names are those of Megatron's releases up to core 0.16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase

Read = Callable[[Sequence[str]], object]


class Verdict(Enum):
    """What becomes of a flag; the value is the heading under which it is reported."""

    TAKEN = "becomes a key"
    SAME = "is so here anyway"
    ABSENT = "has no counterpart, and changes nothing of what is learned"
    DIFFERS = "has no counterpart, and what is learned will differ"


def whole(words: Sequence[str]) -> int:
    """One integer. Raises ValueError."""
    return int(only(words))


def number(words: Sequence[str]) -> float:
    """One number. Raises ValueError."""
    return float(only(words))


def only(words: Sequence[str]) -> str:
    """One word. Raises ValueError."""
    if len(words) != 1:
        raise ValueError(f"it takes one value, not {len(words)}")
    return words[0]


def on(words: Sequence[str]) -> bool:
    """A switch. Raises ValueError for one with a value."""
    if words:
        raise ValueError("it takes no value")
    return True


def off(words: Sequence[str]) -> bool:
    """A switch that clears what is on without it. Raises ValueError for one with a value."""
    return not on(words)


def wholes(words: Sequence[str]) -> list[int]:
    """Any number of integers. Raises ValueError."""
    return [int(word) for word in words]


@dataclass(frozen=True)
class Flag:
    """One flag, or with a ``*`` in its name a family of them.

    ``text`` names the keys that it decides, or is what to tell the user. ``read`` parses its value, which Megatron
    keeps under ``dest``. ``plain``: the value enters the key unchanged. ``same`` is the value that changes nothing.
    ``network``: the flag changes the network, so weights trained with it cannot be imported either.
    """

    name: str
    verdict: Verdict
    text: str
    read: Read = list
    dest: str = ""
    plain: bool = False
    same: str = ""
    network: bool = False

    @property
    def stored(self) -> str:
        """Megatron's name of the value."""
        return self.dest or self.name.removeprefix("--").replace("-", "_")

    def differs(self, value: object) -> bool:
        """Whether ``value``, parsed or out of a checkpoint, is other than the one that changes nothing."""
        if value in (None, False, [], ""):
            return False
        text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        try:
            return not self.same or float(text) != float(self.same)
        except ValueError:
            return text != self.same


def _key(name: str, key: str, read: Read) -> Flag:
    return Flag(name, Verdict.TAKEN, key, read, plain=True)


def _keys(name: str, keys: str, read: Read, dest: str = "") -> Flag:
    return Flag(name, Verdict.TAKEN, keys, read, dest)


def _same(name: str, why: str) -> Flag:
    return Flag(name, Verdict.SAME, why)


def _absent(name: str, why: str, same: str = "") -> Flag:
    return Flag(name, Verdict.ABSENT, why, same=same)


def _differs(name: str, why: str, same: str = "") -> Flag:
    return Flag(name, Verdict.DIFFERS, why, same=same)


def _network(name: str, why: str, same: str = "") -> Flag:
    return Flag(name, Verdict.DIFFERS, why, same=same, network=True)


_MODEL = (
    _key("--num-layers", "model.num_layers", whole),
    _key("--hidden-size", "model.hidden_size", whole),
    _key("--num-attention-heads", "model.num_heads", whole),
    _keys("--group-query-attention", "model.num_kv_heads", on),
    _keys("--num-query-groups", "model.num_kv_heads", whole),
    _keys("--kv-channels", "model.hidden_size / model.num_heads", whole),
    _keys("--ffn-hidden-size", "model.ffn_size", whole),
    _keys("--tokenizer-type", "model.vocab_size", only),
    _keys("--vocab-size", "model.vocab_size", whole),
    _keys("--padded-vocab-size", "model.vocab_size", whole),
    _keys("--merge-file", "model.vocab_size", only),
    _keys("--position-embedding-type", "model.position", only),
    _keys("--use-rotary-position-embeddings", "model.position", on),
    _keys("--no-position-embedding", "model.position", off, "add_position_embedding"),
    _key("--rotary-base", "model.rope_theta", number),
    _keys("--normalization", "model.norm", only),
    _key("--norm-epsilon", "model.norm_eps", number),
    _keys("--swiglu", "model.activation, model.ffn_size", on),
    _keys("--openai-gelu", "model.activation", on),
    _keys("--no-bias-gelu-fusion", "model.activation", off, "bias_gelu_fusion"),
    _keys("--disable-bias-linear", "model.bias", off, "add_bias_linear"),
    _keys("--add-qkv-bias", "model.bias", on),
    _keys("--untie-embeddings-and-output-weights", "model.tie_embeddings", on),
    _keys("--hidden-dropout", "model.dropout", number),
    _keys("--attention-dropout", "model.dropout", number),
    _key("--init-method-std", "model.init_std", number),
)
_TRAIN = (
    _key("--train-iters", "train.steps", whole),
    _key("--train-samples", "train.samples", whole),
    _key("--seq-length", "train.sequence_length", whole),
    _key("--micro-batch-size", "train.micro_batch_size", whole),
    _keys("--global-batch-size", "train.global_batch_size", whole),
    _keys("--rampup-batch-size", "train.ramp_up", wholes),
    _keys("--fp16", "train.precision, scaler", on),
    _keys("--bf16", "train.precision", on),
    _key("--seed", "train.seed", whole),
    _key("--lr", "train.lr", number),
    _key("--min-lr", "train.min_lr", number),
    _keys("--lr-decay-style", "train.lr_shape", only),
    _keys("--lr-decay-iters", "train.lr_decay", whole),
    _keys("--lr-decay-samples", "train.lr_decay", whole),
    _keys("--lr-warmup-fraction", "train.lr_warmup", number),
    _keys("--lr-warmup-iters", "train.lr_warmup", whole),
    _keys("--lr-warmup-samples", "train.lr_warmup", whole),
    _keys("--lr-wsd-decay-style", "train.lr_wsd_shape", only),
    _keys("--lr-wsd-decay-iters", "train.lr_wsd", whole),
    _keys("--lr-wsd-decay-samples", "train.lr_wsd", whole),
    _keys("--weight-decay", "train.weight_decay", number),
    _keys("--start-weight-decay", "train.weight_decay", number),
    _keys("--end-weight-decay", "train.weight_decay_end", number),
    _keys("--weight-decay-incr-style", "train.weight_decay_shape", only),
    _key("--clip-grad", "train.clip_norm", number),
    _keys("--recompute-granularity", "train.recompute", only),
    _keys("--checkpoint-activations", "train.recompute", on),
    _keys("--recompute-activations", "train.recompute", on),
    _keys("--recompute-modules", "train.recompute", list),
    _key("--log-num-zeros-in-grad", "train.count_zeros", on),
)
_PLUGINS = (
    _keys("--loss-scale", "scaler.use, scaler.loss_scale", number),
    _keys("--initial-loss-scale", "scaler.initial_loss_scale", number),
    _keys("--min-loss-scale", "scaler.min_loss_scale", number),
    _keys("--loss-scale-window", "scaler.loss_scale_window", number),
    _keys("--hysteresis", "scaler.hysteresis", whole),
    _keys("--use-distributed-optimizer", "optimizer.use", on),
    _keys("--optimizer", "optimizer.rule", only),
    _keys("--adam-beta1", "optimizer.betas", number),
    _keys("--adam-beta2", "optimizer.betas", number),
    _key("--adam-eps", "optimizer.eps", number),
    _keys("--sgd-momentum", "optimizer.momentum", number),
    _keys("--muon-momentum", "optimizer.momentum", number),
    _keys("--decoupled-lr", "optimizer.lr_mult", number),
    _keys("--grad-reduce-in-bf16", "optimizer.grad_dtype", on),
    _key("--ddp-bucket-size", "optimizer.bucket_size", whole),
    _keys("--mock-data", "data.use", on),
    _keys("--data-path", "data", list),
)
_PARALLEL = (
    _keys("--tensor-model-parallel-size", "parallel.tensor, parallel-layer.use", whole),
    _keys("--pipeline-model-parallel-size", "parallel.pipeline, schedule.use", whole),
    _keys("--num-layers-per-virtual-pipeline-stage", "parallel.chunks, schedule.use", whole),
    _keys("--num-virtual-stages-per-pipeline-rank", "parallel.chunks, schedule.use", whole),
    _keys("--microbatch-group-size-per-virtual-pipeline-stage", "schedule.group_size", whole),
    _keys("--sequence-parallel", "parallel.sequence", on),
    _key("--decoder-first-pipeline-num-layers", "parallel.first_stage_layers", whole),
    _key("--decoder-last-pipeline-num-layers", "parallel.last_stage_layers", whole),
    _key("--account-for-embedding-in-pipeline-split", "parallel.embedding_as_layer", on),
    _key("--account-for-loss-in-pipeline-split", "parallel.loss_as_layer", on),
)
_EXPERTS = (
    _keys("--num-experts", "model.experts", whole),
    _key("--moe-router-topk", "model.top_k", whole),
    _key("--moe-ffn-hidden-size", "model.expert_ffn_size", whole),
    _keys("--moe-layer-freq", "model.expert_layer_freq, model.expert_layer_pattern", only),
    _key("--moe-router-score-function", "model.router_score_function", only),
    _key("--moe-router-pre-softmax", "model.router_pre_softmax", on),
    _key("--moe-router-topk-scaling-factor", "model.router_topk_scaling_factor", number),
    _keys("--moe-router-load-balancing-type", "model.aux_loss_coeff", only),
    _keys("--moe-aux-loss-coeff", "model.aux_loss_coeff", number),
    _key("--moe-z-loss-coeff", "model.z_loss_coeff", number),
    _key("--moe-expert-capacity-factor", "model.expert_capacity_factor", number),
    _key("--moe-token-drop-policy", "model.token_drop_policy", only),
    _key("--moe-shared-expert-intermediate-size", "model.shared_expert_ffn_size", whole),
    _key("--moe-shared-expert-gate", "model.shared_expert_gate", on),
    _keys("--moe-token-dispatcher-type", "model.token_dispatcher", only),
    _keys("--expert-model-parallel-size", "parallel.expert", whole),
)
_RUN = (
    _keys("--save", "run.folder", only),
    _keys("--save-interval", "checkpoint.interval", whole),
    _key("--async-save", "checkpoint.async_save", on),
    _key("--check-weight-hash-across-dp-replicas-interval", "guard.replica_interval", whole),
    _keys("--exit-duration-in-mins", "run.time_limit", whole),
    _keys("--distributed-timeout-minutes", "run.timeout", whole),
    _key("--deterministic-mode", "run.deterministic", on),
    _key("--eval-interval", "eval.interval", whole),
    _keys("--eval-iters", "eval.batches", whole),
)
_ALWAYS = (
    _same("--transformer-impl", "layers are `dense` or `tensor`; `te` is a parallel-layer plugin that may be chosen"),
    _same("--attention-backend", "attention is computed in a fused way wherever that is right"),
    _same("--use-flash-attn", "attention is computed in a fused way wherever that is right"),
    _same("--attention-softmax-in-fp32", "the softmax is computed in fp32"),
    _same("--apply-query-key-layer-scaling", "scores are not computed in fp16 alone, which is what it is for"),
    _same("--apply-layernorm-1p", "the same function and the same updates: norm weights do not decay"),
    _same("--accumulate-allreduce-grads-in-fp32", "gradients are summed and reduced in fp32"),
    _same("--overlap-grad-reduce", "the default: optimizer.overlap_grad_reduce"),
    _same("--overlap-param-gather", "the default of zero1: optimizer.overlap_param_gather"),
    _same("--overlap-p2p-communication*", "messages overlap the computation that does not need them"),
    _same("--make-vocab-size-divisible-by", "the vocabulary is padded to a multiple of 128 x parallel.tensor"),
    _same("--max-position-embeddings", "there are as many positions as train.sequence_length"),
    _same("--use-cpu-initialization", "initial weights do not depend on how the model is split"),
    _same("--calculate-per-token-loss", "every token of a global batch weighs the same"),
    _same("--check-for-spiky-loss", "a spike is always told; guard.spike says what is done about it"),
    _same("--log-straggler", "the ranks' speeds are compared: guard.straggler_interval"),
    _same("--exit-signal-handler", "SIGTERM finishes the step and saves"),
    _same("--tensorboard-dir", "observer `tensorboard` writes into the run folder"),
    _same("--log-throughput", "tokens and TFLOP per second are always reported"),
    _same("--log-interval", "every step is recorded"),
    _same("--moe-grouped-gemm", "the experts of a rank are one grouped product"),
    _same("--moe-router-dtype", "a router's scores are fp32"),
    _same("--use-mcore-models", "there is one implementation"),
    _same("--distributed-backend", "nccl on GPUs, gloo on CPUs"),
    _same("--no-create-attention-mask-in-dataloader", "the mask is causal and never made"),
    _same("--use-checkpoint-args", "`megatron-run import` takes them from the checkpoint"),
)
_NETWORK = (
    _network("--moe-router-enable-expert-bias", "what a router adds to its scores is nothing"),
    _network("--moe-router-num-groups", "experts are chosen among all"),
    _network("--moe-router-group-topk", "experts are chosen among all"),
    _network("--moe-apply-probs-on-input", "an expert's output is weighed, not its input"),
    _network("--moe-latent-size", "experts see the hidden size"),
    _network("--multi-latent-attention", "attention has query, key and value heads"),
    _network("--qk-layernorm", "queries and keys are not normalised"),
    _network("--qk-l2-norm", "queries and keys are not normalised"),
    _network("--squared-relu", "activations are gelu, gelu_tanh and swiglu"),
    _network("--quick-geglu", "activations are gelu, gelu_tanh and swiglu"),
    _network("--glu-linear-offset", "swiglu has no offset", "0"),
    _network("--apply-residual-connection-post-layernorm", "the residual stream is not normalised"),
    _network("--mtp-num-layers", "one token is predicted", "0"),
    _network("--rotary-percent", "all features of a head are rotated", "1"),
    _network("--rotary-interleaved", "feature j is rotated together with feature j + d/2"),
    _network("--rotary-seq-len-interpolation-factor", "angles are not interpolated", "1"),
    _network("--use-rope-scaling", "angles are not scaled"),
    _network("--no-rope-freq", "every layer rotates"),
    _network("--rope-type", "angles are not scaled", "rope"),
    _network("--window-size", "attention is over the whole past"),
    _network("--softmax-type", "no offset in the softmax", "vanilla"),
    _network("--heterogeneous-layers-config-path", "all layers are alike"),
    _network("--retro-add-retriever", "there is no retrieval"),
)
_LEARNED = (
    _differs("--load", "starts from other weights: `megatron-run import` them, then name them in run.init_from"),
    _differs("--pretrained-checkpoint", "starts from other weights: `megatron-run import`, then run.init_from"),
    _differs("--finetune", "starts from other weights: `megatron-run import`, then run.init_from"),
    _differs("--train-data-path", "indexed datasets are not read yet"),
    _differs("--valid-data-path", "indexed datasets are not read yet"),
    _differs("--test-data-path", "indexed datasets are not read yet"),
    _differs("--data-args-path", "indexed datasets are not read yet"),
    _differs("--split", "indexed datasets are not read yet"),
    _differs("--reset-position-ids", "documents in a sample are not told apart"),
    _differs("--reset-attention-mask", "documents in a sample are not told apart"),
    _differs("--eod-mask-loss", "the end of a document is a token as others are"),
    _differs("--lr-warmup-init", "the warm-up starts at 0", "0"),
    _differs("--decoupled-min-lr", "optimizer.lr_mult scales train.min_lr too"),
    _differs("--embedding-init-method-std", "all matrices start alike: model.init_std"),
    _differs("--init-method-xavier-uniform", "matrices start normally distributed"),
    _differs("--data-parallel-random-init", "all copies of the model start equal"),
    _differs("--fp32-residual-connection", "the residual stream has the type of the parameters"),
    _differs("--iterations-to-skip", "no step is left out"),
    _differs("--moe-input-jitter-eps", "no noise is added", "0"),
    _differs("--moe-use-upcycling", "experts are not made from a dense model"),
    _differs("--moe-router-force-load-balancing", "tokens go where the router sends them"),
)
_LEFT = (
    _absent("--context-parallel-size", "sequences are not split over ranks", "1"),
    _absent("--expert-tensor-parallel-size", "experts are split over the tensor ranks as other layers are"),
    _absent("--moe-*", "how experts are computed, and what overlaps it, is decided by the layers"),
    _absent("--*overlap-moe-*", "how experts are computed, and what overlaps it, is decided by the layers"),
    _absent("--pipeline-model-parallel-layout", "write the split into parallel.layers"),
    _absent("--recompute-method", "with train.recompute=full each layer is a unit", "uniform"),
    _absent("--recompute-num-layers", "with train.recompute=full each layer is a unit", "1"),
    _absent("--cpu-offloading*", "activations wait on the host by segment, not by number of layers: train.offload"),
    _absent("--distribute-saved-activations", "sequence parallelism splits them: parallel.sequence"),
    _absent("--fp16-lm-cross-entropy", "the loss is computed in fp32"),
    _absent("--cross-entropy-*", "there is one cross entropy, which never makes a copy of the logits"),
    _absent("--fp8-*", "`parallel-layer: {use: te, fp8: ...}`"),
    _absent("--cuda-graph-*", "graphs are captured by `graph-capture`, as `partial`"),
    _absent("--enable-cuda-graph", "graphs are captured by `graph-capture`, as `partial`"),
    _absent("--external-cuda-graph", "graphs are captured by `graph-capture`, as `partial`"),
    _absent("--use-torch-fsdp2", "optimizer state is sharded by zero1"),
    _absent("--use-megatron-fsdp", "optimizer state is sharded by zero1"),
    _absent("--*ckpt*", "checkpoints have one format"),
    _absent("--no-save-*", "a checkpoint holds everything"),
    _absent("--no-load-*", "run.init_from takes weights alone"),
    _absent("--non-persistent-*", "every checkpoint is kept as checkpoint.keep says"),
    _absent("--save-retain-interval", "checkpoint.keep"),
    _absent("--exit-interval", "run.time_limit, or a signal"),
    _absent("--tokenizer-model", "tokens are made before training"),
    _absent("--vocab-file", "tokens are made before training"),
    _absent("--data-cache-path", "nothing is cached"),
    _absent("--num-workers", "samples are made by the rank itself"),
    _absent("--dataloader-type", "samples are made by the rank itself"),
    _absent("--*straggler*", "the ranks' speeds are compared: guard.straggler_interval"),
    _absent("--no-*-fusion", "which kernels are fused is decided by the layers"),
    _absent("--no-persist-layer-norm", "which kernels are fused is decided by the layers"),
    _absent("--no-align-*", "each rank communicates when it is ready"),
    _absent("--no-overlap-p2p-communication", "messages overlap the computation that does not need them"),
    _absent("--no-scatter-gather-tensors-in-pipeline", "the default; the other way is parallel.scatter_messages"),
    _absent("--tp-comm-*", "the tensor layers overlap what they can"),
    _absent("--ddp-*", "buckets: optimizer.bucket_size"),
    _absent("--manual-gc*", "Python's garbage collector is left alone"),
    _absent("--empty-unused-memory-level", "the allocator is left alone"),
    _absent("--profile*", "observer `profiler` records steps"),
    _absent("--use-pytorch-profiler", "observer `profiler` records steps"),
    _absent("--timing-log-*", "metrics.jsonl has the time of each step"),
    _absent("--log-*", "metrics.jsonl and TensorBoard have what is measured"),
    _absent("--no-log-*", "metrics.jsonl and TensorBoard have what is measured"),
    _absent("--tensorboard-*", "observer `tensorboard` writes every step"),
    _absent("--wandb-*", "observer `wandb` sends every step"),
    _absent("--*one-logger*", "write an observer, or send metrics.jsonl"),
    _absent("--check-for-*", "a step with a non-finite gradient is always skipped"),
    _absent("--no-check-for-nan-in-loss-and-grad", "a step with a non-finite gradient is always skipped"),
    _absent("--inprocess-*", "a failed run is started again from its folder"),
    _absent("--inference-*", "this trains"),
    _absent("--rerun-mode", "steps are not run again"),
)
#: All flags; the first that matches a name decides.
FLAGS = (*_MODEL, *_TRAIN, *_PLUGINS, *_PARALLEL, *_EXPERTS, *_RUN, *_ALWAYS, *_NETWORK, *_LEARNED, *_LEFT)


def find(name: str) -> Flag | None:
    """The flag ``name``, in which ``_`` counts as ``-``; None where it is unknown.

    A pattern such as ``--moe-*`` must not swallow the misspelt name of a flag that decides what is learned: a name that
    is one typing error away from such a flag is unknown.
    """
    wanted = name.replace("_", "-")
    found = next((flag for flag in FLAGS if fnmatchcase(wanted, flag.name)), None)
    slip = found is not None and "*" in found.name and any(_is_a_slip(wanted, known) for known in _DECIDING)
    return None if slip else found


#: The names of flags that decide what is learned.
_DECIDING = [flag.name for flag in FLAGS if flag.verdict in (Verdict.TAKEN, Verdict.DIFFERS) and "*" not in flag.name]


def _is_a_slip(word: str, known: str) -> bool:
    """Whether ``word`` and ``known`` differ by one inserted, missing or replaced character."""
    short, long = sorted((word, known), key=len)
    same = next(
        (place for place, (one, other) in enumerate(zip(short, long, strict=False)) if one != other), len(short)
    )
    return long[same + 1 :] == short[same + (len(short) == len(long)) :]
