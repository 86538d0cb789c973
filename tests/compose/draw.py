"""What a composition may choose, how one is drawn, and how it is made simpler.

An axis has options, the simplest first; an option is the settings that it stands for. A composition names an option of
each axis, so that it can be made simpler axis by axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

from megatron_run.config.request import Request

#: Words of the command line: ``KEY=VALUE``, where the key of a plugin's choice is its kind.
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

    @property
    def world(self) -> int:
        """Number of ranks; experts are split over data-parallel ones."""
        return self.tensor * self.pipeline * self.data

    @property
    def settings(self) -> Settings:
        """As settings."""
        return tuple(f"parallel.{name}={size}" for name, size in self._asdict().items() if size > 1)


#: Of every run. A large initialisation, rate and epsilon let a small fault move the weights, and keep rounding from
#: doing so: Adam divides by little where gradients are zero but for rounding.
BASE: Settings = (
    *("model.hidden_size=16", "model.num_heads=4", "model.init_std=0.05", "data.vocab_size=64"),
    *("train.sequence_length=8", "train.steps=4", "train.lr=2e-2", "train.lr_warmup=1"),
    *("eval.batches=1", "guard.straggler_interval=0", "run.peak_tflops=1", "observer.use=jsonl"),
)
#: Samples of a global batch: divisible by every micro batch on every number of data-parallel ranks.
_BATCH = 8
_RAMP = (f"train.ramp_up.start={_BATCH}", f"train.ramp_up.increment={_BATCH}", f"train.ramp_up.samples={2 * _BATCH}")

_GROWS = ("train.weight_decay_end=0.1", "train.weight_decay_shape=linear")

#: What decides what is learned: the single process has it too.
LEARNED = (
    Axis("layers", [("model.num_layers=4",), ("model.num_layers=8",)]),
    Axis("embeddings", [("model.tie_embeddings=true",), ("model.tie_embeddings=false",)]),
    Axis("norm", [("model.norm=layernorm",), ("model.norm=rmsnorm",)]),
    Axis("activation", [("model.activation=gelu",), ("model.activation=swiglu",)]),
    Axis("position", [("model.position=learned",), ("model.position=rope",)]),
    Axis("kv_heads", [(), ("model.num_kv_heads=2",)]),
    Axis("bias", [("model.bias=true",), ("model.bias=false",)]),
    Axis(
        "experts",
        [
            (),
            ("model.experts=4", "model.top_k=2"),
            (
                *("model.experts=4", "model.top_k=1", "model.router_pre_softmax=true"),
                *("model.expert_capacity_factor=1.0", "model.z_loss_coeff=1e-3"),
            ),
            ("model.experts=4", "model.expert_layer_freq=2", "model.shared_expert_ffn_size=16"),
            ("model.experts=4", "model.router_score_function=sigmoid", "model.token_dispatcher=allgather"),
        ],
    ),
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
)
#: How a run is split over ranks, by the number of the option of ``ranks``.
SPLITS = (
    *(Sizes(), Sizes(tensor=2), Sizes(pipeline=2), Sizes(data=2), Sizes(data=2, expert=2)),
    *(Sizes(tensor=2, pipeline=2), Sizes(tensor=2, data=2), Sizes(tensor=2, data=2, expert=2)),
    *(Sizes(pipeline=2, data=2), Sizes(pipeline=2, data=2, expert=2)),
    *(Sizes(tensor=4), Sizes(pipeline=4), Sizes(data=4), Sizes(data=4, expert=2)),
)
_RANKS = Axis("ranks", [sizes.settings for sizes in SPLITS])
#: The ranks on which the second half of the run resumes; the first option: it is not interrupted.
_THEN = Axis("then", [(), *_RANKS.options])
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
    Axis("sequence", [(), ("parallel.sequence=true",)], needs="tensor"),
    Axis("messages", [(), ("parallel.scatter_messages=true",)], needs="tensor"),
    Axis("uneven", [(), ("parallel.embedding_as_layer=true",)], needs="pipeline"),
    Axis("update", [("optimizer=adamw",), ("optimizer=zero1",), ("optimizer=zero1,bucket_size=300",)]),
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
    Axis("save", [(), ("checkpoint.async_save=true",)]),
)
_KINDS = ("optimizer", "schedule", "parallel-layer", "graph-capture")


@dataclass(frozen=True)
class Composition:
    """The number of the chosen option of some axes; of the others it is 0, the simplest."""

    choices: tuple[tuple[str, int], ...] = ()

    @classmethod
    def drawn(cls, random: Random) -> Composition:
        """Draw one. Half of the axes keep their simplest option: few things meet at a time, but any two do."""
        choices = {
            axis.name: random.randrange(len(axis.options))
            for axis in (*LEARNED, _THEN, *CARRIED_OUT)
            if random.random() < 0.5
        }
        choices["ranks"] = random.randrange(1, len(SPLITS))  # there is something to compare
        return cls(tuple((name, number) for name, number in choices.items() if number))

    def simpler(self) -> Iterator[Composition]:
        """Every composition with the simplest option of one more axis."""
        for choice in self.choices:
            yield replace(self, choices=tuple(other for other in self.choices if other != choice))

    def _settings(self, axis: Axis) -> Settings:
        return axis.options[dict(self.choices).get(axis.name, 0)]

    @property
    def reference(self) -> Request:
        """The single process that learns the same."""
        return self._request(self._learned, 1)

    @property
    def attempts(self) -> list[Request]:
        """The run: one attempt, or another one that goes on from the middle, on other ranks."""
        chosen = dict(self.choices)
        splits = [SPLITS[chosen.get("ranks", 0)]] + ([SPLITS[chosen["then"] - 1]] if "then" in chosen else [])
        return [self._attempt(sizes) for sizes in splits]

    @property
    def _learned(self) -> Settings:
        return tuple(each for axis in LEARNED for each in self._settings(axis))

    def _attempt(self, sizes: Sizes) -> Request:
        """One attempt. What its sizes leave without an effect is left out, since it would be refused."""
        if not any(each.startswith("model.experts=") for each in self._learned):
            sizes = sizes._replace(expert=1)
        axes = [axis for axis in CARRIED_OUT if not axis.needs or getattr(sizes, axis.needs) > 1]
        carried = [each for axis in axes for each in self._settings(axis)]
        return self._request((*self._learned, *carried, *sizes.settings), sizes.world)

    def _request(self, settings: Settings, world: int) -> Request:
        plugins = tuple(dict.fromkeys(each for each in settings if each.partition("=")[0] in _KINDS))
        sets = (each for each in settings if each.partition("=")[0] not in _KINDS)
        return Request(configs=("preset:tiny",), sets=(*BASE, *sets), plugins=plugins, nproc=world)

    def __str__(self) -> str:
        axes = {axis.name: axis for axis in (*LEARNED, _RANKS, _THEN, *CARRIED_OUT)}
        said = [f"{name}: {' '.join(axes[name].options[number]) or 'one rank'}" for name, number in self.choices]
        return "; ".join(said) or "the simplest"
