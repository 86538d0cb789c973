"""The kernel's configuration keys: type, default, bounds and meaning of each.

A plugin's options are defined in the plugin, by its own pydantic model, and set in the section of its kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from megatron_run.contracts.meaning import FIXED, NOT_LEARNED
from megatron_run.contracts.quantities import Duration, Span
from megatron_run.errors.wording import advice, did_you_mean

Shape = Literal["constant", "linear", "cosine"]
#: Names of segments; ``full``: every segment of a layer.
SegmentNames = Literal["none", "full"] | tuple[str, ...]
#: The segments around the layers. ``full`` leaves them out.
_AROUND_LAYERS = ("embedding", "head", "loss")


class Section(BaseModel):
    """A frozen set of keys; an unknown key is an error. ``repr`` shows the values that differ from the defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, field in type(self).model_fields.items():
            if field.is_required() or getattr(self, name) != field.get_default(call_default_factory=True):
                yield name, getattr(self, name)


class RunSection(Section):
    """Where and how a run is executed. Only ``init_from`` and ``branch_from`` affect what is learned."""

    folder: Path | None = Field(None, description="run folder; unset: a new one in runs/")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda with a GPU for every local rank, else cpu"
    )
    backend: Literal["auto", "nccl", "gloo"] = Field("auto", description="auto: nccl between GPUs, else gloo")
    threads: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        "auto", description="CPU threads per rank; auto: cores / local ranks"
    )
    start_method: Literal["auto", "spawn"] = Field("auto", description="auto: fork CPU ranks; spawn: each imports anew")
    timeout: float = Field(600.0, gt=0, description="seconds to wait for a rank to join, answer or progress")
    time_limit: Duration | None = Field(
        None, description="from the start of training; then finish the step, save, exit with 75"
    )
    stop_within: Duration | None = Field(
        None, description="from a signal to the end; finishing the step or saving it is left undone where it cannot fit"
    )
    stop_file: Path | None = Field(
        None, description="once such a file is written, stop as after SIGTERM; looked for on each host, once a second"
    )
    elastic: Literal["off", "data", "plan"] = Field(
        "off",
        description="with fewer ranks than wanted, data: fewer copies of the model; plan: the planner's best layout; "
        "the global batch stays",
    )
    min_ranks: int = Field(1, ge=1, le=1_000_000, description="fewest ranks with which run.elastic trains")
    peak_tflops: float | None = Field(
        None,
        gt=0,
        description="peak TFLOP/s of one device, for mfu; unset: data sheet of the GPU; a CPU has none",
    )
    deterministic: bool | None = Field(None, description="only deterministic kernels; unset: true on the CPU")
    init_from: Path | None = Field(
        None, description="start from the weights of this run folder, saved step or imported folder"
    )
    branch_from: str | None = Field(
        None, description="RUN@STEP: go on from this step with all of its state, in another folder"
    )

    @field_validator("branch_from")
    @classmethod
    def _one_source(cls, branch_from: str | None, info: ValidationInfo) -> str | None:
        if branch_from is not None and info.data.get("init_from") is not None:
            raise PydanticCustomError("rule", "run.branch_from and run.init_from are both set; keep one")
        return branch_from


class RampUp(Section):
    """The global batch grows from ``start`` by ``increment`` until ``samples`` samples have been seen."""

    start: int = Field(ge=1, description="first global batch, in samples")
    increment: int = Field(ge=1, description="samples added at a time")
    samples: int = Field(ge=1, description="samples over which the batch grows")


class TrainSection(Section):
    """Length, batch, precision and optimization of the training."""

    steps: int | None = Field(None, ge=1, description="length in optimizer steps; or set train.samples")
    samples: int | None = Field(None, ge=1, description="length in samples; or set train.steps")
    sequence_length: Annotated[int, FIXED] = Field(1024, ge=1, description="tokens per sample")
    micro_batch_size: int = Field(1, ge=1, description="samples per forward on one rank")
    global_batch_size: int = Field(ge=1, description="samples per optimizer step; accumulation follows")
    ramp_up: RampUp | None = Field(None, description="grow the global batch at the start")
    loss_mean: Literal["microbatch", "token"] = Field(
        "microbatch", description="mean of microbatch means, or over all tokens of a global batch"
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="type of parameters and activations")
    matmul_precision: Literal["highest", "high", "medium"] = Field(
        "highest", description="of products of fp32 values: highest as they are, high in TF32, medium in bf16"
    )
    seed: int = Field(1234, ge=0, lt=2**63, description="of initial weights, sample order and dropout")
    lr: float = Field(1.5e-4, gt=0, description="peak learning rate")
    min_lr: float = Field(0.0, ge=0, description="learning rate after the decay")
    lr_shape: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = Field(
        "cosine", description="decay after the warm-up"
    )
    lr_warmup: Span = Field(Span.parse("1%"), description="linear warm-up from 0")
    lr_decay: Span = Field(Span.parse("100%"), description="end of the decay, from the start of training")
    lr_wsd: Span = Field(Span.parse("10%"), description="length of wsd's final decay")
    lr_wsd_shape: Literal["exponential", "minus_sqrt", "linear", "cosine"] = Field(
        "exponential", description="shape of wsd's final decay"
    )
    weight_decay: float = Field(
        0.01,
        ge=0,
        description="decoupled in AdamW, L2 in Adam and SGD; not on biases and other 1-D parameters",
    )
    weight_decay_end: float | None = Field(None, ge=0, description="weight decay at the end of the run")
    weight_decay_shape: Shape = Field("constant", description="ramp to train.weight_decay_end")
    clip_norm: float = Field(1.0, ge=0, description="largest gradient norm; 0: no clipping")
    recompute: Annotated[SegmentNames, NOT_LEARNED] = Field(
        "none", description="recompute in the backward: full layers, or segments such as attn, mlp; core_attn"
    )
    offload: Annotated[SegmentNames, NOT_LEARNED] = Field(
        "none", description="move saved activations to host memory until the backward: full layers, or segments"
    )
    count_zeros: Annotated[bool, NOT_LEARNED] = Field(False, description="report the zeros in the gradient each step")
    max_skips: Annotated[int, NOT_LEARNED] = Field(50, ge=1, description="consecutive skipped steps that stop the run")

    @field_validator("samples")
    @classmethod
    def _one_length(cls, samples: int | None, info: ValidationInfo) -> int | None:
        if "steps" not in info.data:  # steps is invalid itself, and reported
            return samples
        if samples is None and info.data["steps"] is None:
            raise PydanticCustomError("rule", "train.steps is not set, nor train.samples; add --set train.steps=...")
        if samples is not None and info.data["steps"] is not None:
            raise PydanticCustomError("rule", "train.steps and train.samples are both set; keep one")
        return samples

    @field_validator("recompute", "offload", mode="before")
    @classmethod
    def _names(cls, names: object) -> object:
        given = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, list | tuple) else (None,)
        if not all(isinstance(name, str) for name in given):
            raise ValueError("it must be none, full, or names of segments")
        return _segment_names(given)

    def recomputes(self, segment: str) -> bool:
        """Whether the segment called ``segment`` is recomputed in the backward."""
        return _names_segment(self.recompute, segment)

    def offloads(self, segment: str) -> bool:
        """Whether the saved activations of the segment called ``segment`` wait in host memory."""
        return _names_segment(self.offload, segment)

    @field_validator("min_lr")
    @classmethod
    def _below_lr(cls, min_lr: float, info: ValidationInfo) -> float:
        if min_lr > info.data.get("lr", min_lr):
            raise PydanticCustomError(
                "beside", "it must be at most train.lr, which is {lr}", {"lr": f"{info.data['lr']:g}"}
            )
        return min_lr

    @field_validator("weight_decay_shape")
    @classmethod
    def _has_an_end(cls, shape: Shape, info: ValidationInfo) -> Shape:
        if shape != "constant" and info.data.get("weight_decay_end", 0.0) is None:
            raise PydanticCustomError("beside", "it needs train.weight_decay_end")
        return shape


def _segment_names(names: tuple[Any, ...]) -> str | tuple[str, ...]:
    """``none``, ``full`` or names without repetitions. Raises ValueError for either word among names."""
    if names in ((), ("none",), ("full",)):
        return "".join(names) or "none"
    if alone := next((choice for choice in ("none", "full") if choice in names), None):
        raise ValueError(f"{alone} stands alone")
    return tuple(dict.fromkeys(names))


def _names_segment(names: SegmentNames, segment: str) -> bool:
    return segment in names if isinstance(names, tuple) else names == "full" and segment not in _AROUND_LAYERS


class ParallelSection(Section):
    """How the work is split over ranks. The world size is tensor x context x pipeline x data."""

    tensor: int = Field(1, ge=1, description="ranks that split each layer")
    context: int = Field(1, ge=1, description="ranks that split the tokens of each sample")
    pipeline: int = Field(1, ge=1, description="stages that split the layers")
    chunks: int = Field(1, ge=1, description="chunks of the model per stage")
    expert: int = Field(1, ge=1, description="data-parallel ranks that split the experts")
    data: int | None = Field(None, ge=1, description="copies of the model; unset: the rest of the world")
    sequence: bool = Field(False, description="sequence parallelism: split norms and dropout over tensor ranks")
    scatter_messages: bool = Field(
        False, description="tensor ranks send a part of each message, and gather it in the next stage"
    )
    layers: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (), description="layers of each stage and chunk in model order; empty: even"
    )
    first_stage_layers: int | None = Field(None, ge=0, description="layers of the first stage, all chunks together")
    last_stage_layers: int | None = Field(None, ge=0, description="layers of the last stage, all chunks together")
    embedding_as_layer: bool = Field(False, description="count the embedding as a layer of an even split")
    loss_as_layer: bool = Field(False, description="count output and loss as a layer of an even split")


#: Tasks on which a language model is evaluated.
TASKS = ("perplexity", "wikitext", "lambada")


def read_task(text: str) -> tuple[str, str]:
    """Name and source of a task written as ``NAME=SOURCE``, as in ``lambada=test.jsonl``. Raises ValueError."""
    name, _, source = text.partition("=")
    if name not in TASKS:
        fix = advice(did_you_mean(name, TASKS), f"write {', '.join(f'{each}=FILE' for each in TASKS)}")
        raise ValueError(f"there is no task {name!r}; {fix}")
    if not source:
        raise ValueError(f"task {name} of what? Write {name}=FILE")
    return name, source


def _tasks(value: object) -> object:
    """One task or a list of them."""
    tasks = (value,) if isinstance(value, str) else value
    if not isinstance(tasks, list | tuple):
        return tasks
    for task in tasks:
        read_task(str(task))
    return tuple(tasks)


class EvalSection(Section):
    """Evaluation on held-out samples and tasks, and text generated at the end."""

    interval: Span = Field(Span.parse(1000), description="between evaluations; 0: only at the end")
    batches: int = Field(10, ge=1, description="global batches per evaluation")
    tasks: Annotated[tuple[str, ...], BeforeValidator(_tasks)] = Field(
        (), description="evaluated each time too: perplexity=FILE, wikitext=FILE, lambada=FILE"
    )
    sample: int = Field(0, ge=0, description="tokens to generate after training")
    prompt: str = Field("", description="start of the generated text")
    temperature: float = Field(0.8, ge=0, description="of the generated text; 0: the likeliest token")


class CheckpointSection(Section):
    """How often the run is saved, besides at its end and when it is stopped, and how many steps are kept."""

    interval: Span = Field(Span.parse(1000), description="between saves; 0: only at the end and when stopped")
    keep: int = Field(2, ge=2, description="newest whole steps to keep")
    keep_every: Span = Field(Span.parse(0), description="keep steps that divide by it for ever; 0: none")
    async_save: bool = Field(False, description="train on while a copy of the state in host memory is written")
    memory_interval: Span = Field(
        Span.parse(0), description="between copies of the state into the memory of hosts; 0: none"
    )
    memory_folder: Path | None = Field(
        None, description="where they lie on each host, with its variables, as $TMPDIR; unset: /dev/shm"
    )


class GuardSection(Section):
    """Guards against bad losses, diverging replicas and slow ranks, and their actions; see also train.max_skips."""

    nan_loss: Literal["skip", "stop"] = Field(
        "skip", description="after a loss that is not finite: skip the update, or stop"
    )
    spike: Literal["continue", "skip", "rewind"] = Field(
        "continue",
        description="after a spike: warn, skip the update, or return to the last saved step",
    )
    spike_factor: float = Field(10.0, gt=0, description="robust deviations above the median that make a spike")
    spike_window: int = Field(128, ge=8, description="last steps with which a loss is compared")
    max_rewinds: int = Field(3, ge=1, description="rewinds before the run stops instead")
    replica_interval: Span = Field(
        Span.parse(1000),
        description="between comparisons of replicated weights, also made before each save; 0: never",
    )
    straggler_interval: Span = Field(Span.parse(100), description="between comparisons of rank speeds; 0: never")
    straggler_factor: float = Field(2.0, gt=1, description="multiple of its peers' median time that makes a straggler")
    exclude: tuple[Literal["differing", "slow"], ...] = Field(
        (), description="ranks that the next start leaves out once they are named; needs run.elastic"
    )


def _frozen(options: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(options))


Options = Annotated[Mapping[str, Any], AfterValidator(_frozen), PlainSerializer(dict)]


class PluginSection(Section):
    """The plugin of a kind (NAME, DIST:NAME or a file) and its options as plain data."""

    use: str = Field(description="name of the plugin")
    options: Options = Field(default_factory=dict, description="options of the plugin")


class PluginsSection(Section):
    """The plugins of a kind that allows several, and their options as plain data by the plugin's name."""

    use: tuple[str, ...] = Field(description="names of the plugins")
    options: Options = Field(default_factory=dict, description="options of the plugins")


class Header(Section):
    """The keys above all sections."""

    version: Annotated[Literal[1], FIXED] = Field(1, description="schema version")


class Config(Header):
    """The whole configuration: one section per topic and one per kind of plugin, with all defaults filled in."""

    run: RunSection
    train: TrainSection
    parallel: ParallelSection
    eval: EvalSection
    checkpoint: CheckpointSection
    guard: GuardSection
    scaler: PluginSection
    optimizer: PluginSection
    schedule: PluginSection
    parallel_layer: PluginsSection
    graph_capture: PluginSection
    model: PluginSection
    data: PluginSection
    observer: PluginsSection


#: Groups of keys of which only one may be set: a stronger source that sets one overrides the others.
RIVALS: tuple[frozenset[tuple[str, ...]], ...] = (
    frozenset({("train", "steps"), ("train", "samples")}),
    frozenset({("run", "init_from"), ("run", "branch_from")}),
)

#: The sections that belong to the kernel, by name.
SECTIONS: Mapping[str, type[Section]] = MappingProxyType(
    {
        "run": RunSection,
        "train": TrainSection,
        "parallel": ParallelSection,
        "eval": EvalSection,
        "checkpoint": CheckpointSection,
        "guard": GuardSection,
    }
)
