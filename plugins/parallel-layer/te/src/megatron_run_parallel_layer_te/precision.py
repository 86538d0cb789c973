"""The options, and FP8: its recipe, the matrix sizes that it requires, and the regions in which it applies.

Legend: s sequence, b micro batch, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field

from megatron_run.config.values import typed
from megatron_run.errors import InputError, PluginError
from megatron_run.errors.wording import nearest_multiples

if TYPE_CHECKING:
    from megatron_run.contracts.schema import Config, TrainSection
    from megatron_run_engine.nn.parallel import LayerSplit
    from megatron_run_engine.runtime import GradientAccumulator
    from megatron_run_parallel_layer_te.library import Engine

Fp8 = Literal["none", "delayed", "current", "mxfp8", "block"]


class Options(BaseModel):
    """Precision of the matrix products, and how weight gradients are computed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fp8: Fp8 = Field("none", description="FP8 scaling of matrix products")
    fp8_format: Literal["auto", "hybrid", "e4m3"] = Field(
        "auto", description="hybrid: gradients in E5M2; auto: hybrid with delayed and current, else e4m3"
    )
    fp8_margin: int = Field(0, ge=0, description="delayed: headroom of scales, in powers of two")
    fp8_amax_history: int = Field(1024, ge=1, description="delayed: microbatches whose largest value is kept")
    fp8_amax: Literal["max", "most_recent"] = Field("max", description="delayed: kept value that sets the scale")
    fuse_weight_gradients: bool = Field(True, description="matrix products add weight gradients to main_grad")
    delay_weight_gradients: bool = Field(
        False, description="compute weight gradients at action W of schedules that split the backward"
    )


def check_config(config: Config, options: Options) -> Iterator[str]:
    """No notices. Raises InputError for delayed FP8 with graph capture: scales update once per whole forward."""
    capture = config.graph_capture.use
    if options.fp8 == "delayed" and capture != "none":
        raise InputError(
            f"parallel-layer.fp8=delayed does not go with graph-capture={capture}",
            why="scales are renewed once after a whole forward, and each graph of a part of it would renew them again",
            fix="set parallel-layer.fp8=current, or choose --plugin graph-capture=none",
        )
    yield from ()


class _Kind(NamedTuple):
    """The class of a recipe, the function that asks for GPU support, and the divisor of every matrix size.

    FP8 tensor cores take 16 values at a time; MXFP8 scales blocks of 32 values, block scaling blocks of 128.
    """

    recipe: str
    available: str
    multiple: int


_KINDS = {
    "delayed": _Kind("DelayedScaling", "is_fp8_available", 16),
    "current": _Kind("Float8CurrentScaling", "is_fp8_available", 16),
    "mxfp8": _Kind("MXFP8BlockScaling", "is_mxfp8_available", 32),
    "block": _Kind("Float8BlockScaling", "is_fp8_block_scaling_available", 128),
}


class QuantizedWeight:
    """The FP8 copy of one product's weight, made once a step instead of once a microbatch.

    The library keeps a copy in its module if ``is_first_microbatch`` is given, and makes it where there is none. True
    would also overwrite ``main_grad`` in the backward of that microbatch, which need not be the step's first: so False
    is passed always, and a step begins by dropping the copy of the step before.
    """

    def __init__(self, gradients: GradientAccumulator, module: Any) -> None:
        self._gradients, self._module = gradients, module
        self._made_in = 0

    def is_first_microbatch(self, *, training: bool) -> bool | None:
        """The argument of the module: False uses the step's copy, None makes one for this call alone.

        A graph must not read a copy that a later step drops.
        """
        step = self._gradients.steps
        if not (step and training) or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return None
        if step != self._made_in:
            self._module._fp8_workspaces.clear()
            self._made_in = step
        return False


class Precision:
    """The precision of matrix products: FP8, or with ``fp8: none`` that of the parameters."""

    def __init__(self, engine: Engine, options: Options, split: LayerSplit, train: TrainSection) -> None:
        self._engine, self._options, self._split = engine, options, split
        self._kind = _KINDS.get(options.fp8)
        if self._kind:
            self._check_tokens(train)
            self._check_recompute(train)

    def region(self, x: torch.Tensor) -> AbstractContextManager[object]:
        """The context for one product of x [*, i].

        Text generation has any number of tokens: a product whose size FP8 cannot take runs without FP8.
        """
        if self._kind is None:
            return nullcontext()
        return self._autocast(enabled=x.shape[:-1].numel() % self._kind.multiple == 0)

    def is_first_microbatch(self, weight: QuantizedWeight, *, training: bool) -> bool | None:
        """The argument of a product whose FP8 weight is ``weight``; without FP8 it says nothing."""
        return weight.is_first_microbatch(training=training) if self._kind else None

    def forward_pass(self) -> AbstractContextManager[object]:
        """The context for all products of a chunk's forward, so that delayed scales update once, after all of them.

        Leaving an outermost region updates the scales of every existing layer, not only of the one that just ran.
        """
        return self._autocast(enabled=True) if self._options.fp8 == "delayed" else nullcontext()

    def check(self, size: int, what: str) -> int:
        """Return ``size``, a side of a matrix. Raises :class:`InputError` with the arithmetic if FP8 cannot take it."""
        if self._kind and size % self._kind.multiple:
            raise InputError(
                f"{size} {what} do not fit parallel-layer.fp8={self._options.fp8}",
                why=self._arithmetic(size),
                fix=f"make them {nearest_multiples(size, self._kind.multiple)}, or set parallel-layer.fp8=none",
            )
        return size

    @cached_property
    def _recipe(self) -> Any:
        """Made lazily: planning has no library."""
        return make_recipe(self._engine, self._options, self._split) if self._kind else None

    def _autocast(self, *, enabled: bool) -> AbstractContextManager[object]:
        group = self._split.peers.group
        region: AbstractContextManager[object] = self._engine.pytorch.autocast(
            enabled=enabled, recipe=self._recipe, amax_reduction_group=group
        )
        return region

    def _check_tokens(self, train: TrainSection) -> None:
        """Check the tokens that a rank quantises: s/t of each sample under sequence parallelism."""
        assert self._kind is not None
        shards = self._split.peers.size if self._split.sequence else 1
        tokens, wanted = train.micro_batch_size * train.sequence_length, self._kind.multiple * shards
        if tokens % wanted:
            shared = f" on each of {shards} tensor-parallel ranks" if shards > 1 else ""
            raise InputError(
                f"train.micro_batch_size={train.micro_batch_size} x train.sequence_length={train.sequence_length} = "
                f"{tokens} tokens do not fit parallel-layer.fp8={self._options.fp8}",
                why=f"{self._arithmetic(tokens / shards)}{shared}",
                fix=f"make their product {nearest_multiples(tokens, wanted)}, or set parallel-layer.fp8=none",
            )

    def _check_recompute(self, train: TrainSection) -> None:
        if self._options.fp8 == "delayed" and train.recompute != "none":
            raise InputError(
                f"parallel-layer.fp8=delayed does not go with train.recompute={typed(train.recompute)}",
                why="scales have changed when a segment is computed again",
                fix="set parallel-layer.fp8=current, or train.recompute=none",
            )

    def _arithmetic(self, size: float) -> str:
        assert self._kind is not None
        multiple = self._kind.multiple
        return f"matrix sizes must be multiples of {multiple}: {size:g} / {multiple} = {size / multiple:g}"


def check_gpu(engine: Engine, options: Options) -> None:
    """Raise :class:`PluginError` if the current GPU does not support the FP8 of ``options``."""
    if options.fp8 == "none":
        return
    able, reason = getattr(engine.pytorch, _KINDS[options.fp8].available)(return_reason=True)
    if not able:
        raise PluginError(
            f"this GPU cannot compute with parallel-layer.fp8={options.fp8}",
            why=reason,
            fix="choose another fp8, or set parallel-layer.fp8=none",
        )


def make_recipe(engine: Engine, options: Options, split: LayerSplit) -> Any:
    """The recipe of ``transformer_engine.common.recipe`` for ``options``, whose fp8 is not none.

    Delayed scales are reduced over the tensor-parallel ranks. Without a group the library would reduce over the whole
    world, where other pipeline stages have other layers, so every rank then keeps its own scales.
    """
    arguments: dict[str, object] = {}
    if options.fp8_format != "auto":
        arguments["fp8_format"] = engine.recipe.Format[options.fp8_format.upper()]
    if options.fp8 == "delayed":
        arguments |= {
            "margin": options.fp8_margin,
            "amax_history_len": options.fp8_amax_history,
            "amax_compute_algo": options.fp8_amax,
            "reduce_amax": split.peers.group is not None,
        }
    return getattr(engine.recipe, _KINDS[options.fp8].recipe)(**arguments)
