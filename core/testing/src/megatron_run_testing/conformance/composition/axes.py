"""The choices of a composition.

An axis has options, the simplest first; an option is the settings that it stands for. ``LEARNED`` decides what is
learned: the single process has it too. ``CARRIED_OUT`` is how the work is done, and must not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

#: Words of the command line: ``KEY=VALUE``, where the key of a plugin's choice is its kind. ``parallel-layer=+NAME`` is
#: stacked on the layers that are chosen.
Settings = tuple[str, ...]


class Axis(NamedTuple):
    """One choice. ``needs`` names the parallel size that must be above 1 for it to have an effect, or is empty."""

    name: str
    options: Sequence[Settings]
    needs: str = ""


class Sizes(NamedTuple):
    """Ranks of one attempt."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    context: int = 1

    @property
    def world(self) -> int:
        """Number of ranks; experts are split over data-parallel ones."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def settings(self) -> Settings:
        """As settings."""
        return tuple(f"parallel.{name}={size}" for name, size in self._asdict().items() if size > 1)

    def within(self, other: Sizes) -> bool:
        """Whether no size is above that of ``other``, and one is below it."""
        return self != other and all(size <= limit for size, limit in zip(self, other, strict=True))


#: The step from which a run goes on that is interrupted.
HALF = 2
#: The prefix of an indexed dataset of short documents, which is written before it is needed.
DOCUMENTS = "{documents}"
#: Of every run. A large initialisation, rate and epsilon let a small fault move the weights, and keep rounding from
#: doing so: Adam divides by little where gradients are zero but for rounding.
BASE: Settings = (
    *("model.hidden_size=16", "model.num_heads=4", "model.init_std=0.05", "model.dropout=0", "data.vocab_size=64"),
    *("train.sequence_length=8", "train.steps=4", "train.lr=2e-2", "train.lr_warmup=1"),
    *("eval.batches=1", "guard.straggler_interval=0", "run.peak_tflops=1", "observer.use=jsonl"),
)
#: Samples of a global batch: divisible by every micro batch on every number of data-parallel ranks.
_BATCH = 8
_RAMP = (f"train.ramp_up.start={_BATCH}", f"train.ramp_up.increment={_BATCH}", f"train.ramp_up.samples={2 * _BATCH}")
_GROWS = ("train.weight_decay_end=0.1", "train.weight_decay_shape=linear")
_ROPE = ("model.position=rope",)
_EXPERTS = ("model.experts.count=4", "model.experts.ffn_size=16")
_LATENT = (
    *("model=deepseek", "model.kv_rank=8", "model.rope_head_size=4", "model.nope_head_size=4"),
    "model.value_head_size=4",
)
_PAIRS = (
    *("model=bert", "data=sentence-pairs", f"data.paths={DOCUMENTS}", "data.split=8,1,1"),
    *("train.sequence_length=24", "model.head=pretraining", "model.norm.eps=1e-5"),
)
_SPANS = (
    *("model=t5", "data=span-corruption", f"data.paths={DOCUMENTS}", "data.split=8,1,1", "data.encoder_length=24"),
    *("train.sequence_length=16", "model.encoder_length=24", "model.head_size=4", "model.norm.eps=1e-5"),
)
_PACKED = (
    *("data=indexed", f"data.paths={DOCUMENTS}", "data.split=8,1,1", "data.end_of_document=0"),
    *("data.packing=documents", "train.sequence_length=32"),
)

#: What decides what is learned: the single process has it too.
LEARNED = (
    Axis("network", [(), _LATENT, (*_LATENT, "model.query_rank=8", "model.mtp_layers=1"), _PAIRS, _SPANS]),
    Axis("data", [(), _PACKED, tuple(each for each in _PACKED if "packing" not in each)]),
    Axis("layers", [("model.num_layers=4",), ("model.num_layers=8",)]),
    Axis("embeddings", [("model.tie_embeddings=true",), ("model.tie_embeddings=false",)]),
    Axis(
        "norm", [(), ("model.norm.kind=rmsnorm",), ("model.norm.kind=layernorm_1p",), ("model.norm.kind=rmsnorm_1p",)]
    ),
    Axis(
        "norm_order", [(), ("model.norm.placement=post", "model.norm.order=post"), ("model.norm.placement=sandwich",)]
    ),
    Axis(
        "qk_norm", [(), ("model.attention.qk_norm=head",), ("model.norm.kind=rmsnorm", "model.attention.qk_norm=full")]
    ),
    Axis(
        "activation",
        [
            (),
            *((f"model.activation={name}",) for name in ("swiglu", "gelu_tanh", "relu_squared", "geglu", "geglu_tanh")),
        ],
    ),
    Axis(
        "position",
        [
            (),
            _ROPE,
            (*_ROPE, "model.rope.fraction=0.5", "model.rope.pattern=1,1,0"),
            (*_ROPE, "model.rope.scaling=linear", "model.rope.factor=2"),
            (*_ROPE, "model.rope.scaling=llama3", "model.rope.factor=4", "model.rope.original_length=4"),
            (*_ROPE, "model.rope.scaling=yarn", "model.rope.factor=4", "model.rope.original_length=4"),
        ],
    ),
    Axis(
        "window",
        [(), ("model.attention.window=3",), ("model.attention.window=3", "model.attention.window_pattern=1,0")],
    ),
    Axis("softcap", [(), ("model.attention.softcap=0.5", "model.logits_softcap=2")]),
    Axis("heads", [(), ("model.num_kv_heads=2",), ("model.num_kv_heads=1",), ("model.head_size=8",)]),
    Axis(
        "bias",
        [
            (),
            ("model.bias=false",),
            ("model.bias=false", "model.attention.qkv_bias=true"),
            ("model.attention.qkv_bias=false",),
        ],
    ),
    Axis("residual", [(), ("model.parallel_residual=true",), ("model.residual_scale=0.5",)]),
    Axis("scales", [(), ("model.embedding_scale=4", "model.logits_scale=0.5"), ("model.attention.scale=0.4",)]),
    Axis(
        "experts",
        [
            (),
            ("model.experts.count=4", "model.experts.top_k=2"),
            (
                *("model.experts.count=4", "model.experts.top_k=1", "model.experts.router.pre_softmax=true"),
                *("model.experts.capacity_factor=1.0", "model.experts.z_loss_coeff=1e-3"),
            ),
            ("model.experts.count=4", "model.experts.layer_freq=2", "model.experts.shared.ffn_size=16"),
            (
                "model.experts.count=4",
                "model.experts.router.score_function=sigmoid",
                "model.experts.dispatcher=allgather",
            ),
            (
                *(*_EXPERTS, "model.experts.router.groups=2", "model.experts.router.score_function=sigmoid"),
                *(
                    "model.experts.router.bias_rate=0.05",
                    "model.experts.aux_loss_coeff=0",
                    "model.experts.router.scaling_factor=2",
                ),
            ),
            (
                *(*_EXPERTS, "model.experts.layer_first=1", "model.experts.shared.ffn_size=16"),
                *("model.experts.shared.gate=true", "model.experts.router.norm_weights=false"),
            ),
            (
                *(*_EXPERTS, "model.experts.layer_pattern=0,1", "model.experts.capacity_factor=1.0"),
                *("model.experts.pad_to_capacity=true", "model.experts.drop_policy=position"),
            ),
        ],
    ),
    Axis("adapters", [(), ("parallel-layer=+lora,rank=2,alpha=4,targets=all",)]),
    Axis("micro", [("train.micro_batch_size=1",), ("train.micro_batch_size=2",)]),
    Axis(
        "batch",
        [
            (f"train.global_batch_size={_BATCH}",),
            (f"train.global_batch_size={2 * _BATCH}",),
            (f"train.global_batch_size={2 * _BATCH}", *_RAMP),
        ],
    ),
    Axis("decay", [("train.weight_decay=0.05",), ("train.weight_decay=0.05", *_GROWS), ("train.weight_decay=0",)]),
    Axis("clip", [("train.clip_norm=0.3",), ("train.clip_norm=0",)]),
    Axis("rate", [("train.lr_shape=constant",), ("train.lr_shape=cosine",)]),
    Axis("rule", [("optimizer.eps=1e-3",), ("optimizer.rule=sgd",)]),
    Axis("loss", [(), ("model.loss_chunks=2",), ("train.loss_mean=token",), ("model.label_smoothing=0.1",)]),
    Axis("eval", [("eval.interval=0",), ("eval.interval=2",)]),
    Axis("precision", [(), ("train.precision=bf16",), ("train.precision=fp16", "scaler=constant,loss_scale=256")]),
)
#: How a run is split over ranks, by the number of the option of ``ranks``; the first is the single process.
SPLITS = (
    *(Sizes(), Sizes(tensor=2), Sizes(pipeline=2), Sizes(data=2), Sizes(data=2, expert=2)),
    *(Sizes(tensor=2, pipeline=2), Sizes(tensor=2, data=2), Sizes(tensor=2, data=2, expert=2)),
    *(Sizes(pipeline=2, data=2), Sizes(pipeline=2, data=2, expert=2)),
    *(Sizes(tensor=4), Sizes(pipeline=4), Sizes(data=4), Sizes(data=4, expert=2)),
    *(Sizes(context=2), Sizes(context=4), Sizes(tensor=2, context=2), Sizes(pipeline=2, context=2)),
    *(Sizes(data=2, context=2), Sizes(data=2, expert=2, context=2)),
)
#: How the work is carried out: must not show.
CARRIED_OUT = (
    Axis(
        "schedule",
        [
            ("schedule=1f1b",),
            ("schedule=gpipe",),
            ("schedule=gpipe", "parallel.chunks=2"),
            ("schedule=interleaved", "parallel.chunks=2"),
            ("schedule=zero-bubble,variant=h1",),
            ("schedule=zero-bubble,variant=v", "parallel.chunks=2"),
        ],
        needs="pipeline",
    ),
    Axis("layer", [("parallel-layer=tensor",)], needs="tensor"),
    Axis(
        "pieces",
        [
            ("parallel-layer=+context",),
            ("parallel-layer=+context,method=all_gather",),
            ("parallel-layer=+context,method=ulysses",),
        ],
        needs="context",
    ),
    Axis("sequence", [(), ("parallel.sequence=true",)], needs="tensor"),
    Axis("messages", [(), ("parallel.scatter_messages=true",)], needs="tensor"),
    Axis("uneven", [(), ("parallel.embedding_as_layer=true",)], needs="pipeline"),
    Axis(
        "update",
        [
            ("optimizer=adamw",),
            ("optimizer=zero1",),
            ("optimizer=zero1,bucket_size=300",),
            ("optimizer=zero1,bucket_size=300,state_on_host=true",),
            ("optimizer=zero3,whole_below=0",),
            ("optimizer=zero3,whole_below=40,reduce=step,segments_held=0",),
        ],
    ),
    Axis("scaler", [(), ("scaler=constant,loss_scale=64",), ("scaler=dynamic,initial_loss_scale=64",)]),
    Axis(
        "recompute",
        [
            (),
            ("train.recompute=full",),
            ("train.recompute=core_attn",),
            ("train.recompute=attn",),
            ("train.offload=full",),
        ],
    ),
    Axis("capture", [(), ("graph-capture=partial",)]),
    Axis("save", [(), ("checkpoint.async_save=true",), ("checkpoint.async_save=true", "checkpoint.interval=1")]),
)
