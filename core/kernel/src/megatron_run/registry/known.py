"""First-party plugins and commands that may not be installed: for hints and for planning without the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron_run.errors.install_hint import ENGINE, how_to_install


@dataclass(frozen=True)
class Known:
    """A first-party plugin. ``provides`` as in PluginInfo. ``builtin``: it comes with the engine.

    ``vocab_size`` is the number of token ids of data that say one without being told, else 0. ``within`` is the plugin
    of the same kind whose distribution holds it, empty where it has one of its own.
    """

    kind: str
    name: str
    provides: frozenset[str] = frozenset()
    builtin: bool = False
    within: str = ""
    vocab_size: int = 0

    @property
    def distribution(self) -> str:
        """The distribution that holds it."""
        return ENGINE if self.builtin else f"megatron-run-{self.kind}-{self.within or self.name}"

    @property
    def suggests(self) -> Mapping[str, Any]:
        """The values that it suggests, whatever its options, as in PluginInfo."""
        return SUGGESTS.get(f"{self.kind}={self.name}", {})

    @property
    def summary(self) -> str:
        """The line that its distribution says of itself, or of the engine's its module."""
        return SUMMARIES.get(f"{self.kind}={self.name}" if self.builtin else self.distribution, "")

    @property
    def how_to_get(self) -> str:
        """The command that brings it."""
        return how_to_install(self.distribution)


#: By kind, those of the engine first.
KNOWN: tuple[Known, ...] = (
    # [[[cog from tests.support import first_party; cog.outl('\n'.join(first_party.known())) ]]]
    Known("scaler", "none", builtin=True),
    Known("scaler", "constant", frozenset({"train.precision=fp16"})),
    Known("scaler", "dynamic", frozenset({"train.precision=fp16"})),
    Known("optimizer", "adamw", builtin=True),
    Known("optimizer", "deepspeed"),
    Known("optimizer", "zero1"),
    Known("optimizer", "zero3"),
    Known("schedule", "1f1b", frozenset({"parallel.pipeline"})),
    Known("schedule", "gpipe", frozenset({"parallel.chunks", "parallel.pipeline"})),
    Known("schedule", "interleaved", frozenset({"parallel.chunks", "parallel.pipeline"})),
    Known("schedule", "zero-bubble", frozenset({"parallel.chunks", "parallel.pipeline"})),
    Known("parallel-layer", "dense", builtin=True),
    Known("parallel-layer", "context", frozenset({"parallel.context"})),
    Known("parallel-layer", "fp8"),
    Known("parallel-layer", "lora"),
    Known("parallel-layer", "te", frozenset({"parallel.sequence", "parallel.tensor"})),
    Known("parallel-layer", "tensor", frozenset({"parallel.sequence", "parallel.tensor"})),
    Known("graph-capture", "none", builtin=True),
    Known("graph-capture", "compile"),
    Known("graph-capture", "partial"),
    Known("graph-capture", "te"),
    Known("model", "gpt", frozenset({"parallel.expert"}), builtin=True),
    Known("model", "bert"),
    Known("model", "deepseek", frozenset({"parallel.expert"})),
    Known("model", "t5"),
    Known("data", "mock", builtin=True, vocab_size=128),
    Known("data", "text", builtin=True, vocab_size=257),
    Known("data", "indexed"),
    Known("data", "instruct", vocab_size=257),
    Known("data", "nlu"),
    Known("data", "sentence-pairs"),
    Known("data", "span-corruption"),
    Known("observer", "console", builtin=True),
    Known("observer", "jsonl", builtin=True),
    Known("observer", "mlflow"),
    Known("observer", "profiler"),
    Known("observer", "tensorboard"),
    Known("observer", "trace"),
    Known("observer", "wandb"),
    Known("format", "distributed", frozenset({"export", "import"})),
    Known("format", "huggingface", frozenset({"export", "fetch", "import", "publish"})),
    Known("format", "megatron", frozenset({"import", "launch-script"})),
    Known("format", "peft", frozenset({"adapters", "export", "publish"}), within="huggingface"),
    # [[[end]]]
)


#: The suggestions of those that have some, written ``kind=name``.
SUGGESTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # [[[cog from tests.support import first_party; cog.outl('\n'.join(first_party.suggestions())) ]]]
        "schedule=1f1b": {"parallel.pipeline": 2},
        "schedule=gpipe": {"parallel.pipeline": 2},
        "schedule=interleaved": {"parallel.pipeline": 2, "parallel.chunks": 2},
        "schedule=zero-bubble": {"parallel.pipeline": 2},
        "parallel-layer=context": {"parallel.context": 2},
        "parallel-layer=tensor": {"parallel.tensor": 2},
        "data=instruct": {"train.loss_mean": "token"},
        # [[[end]]]
    }
)


#: What each distribution of plugins says of itself, for those who look for one that is not installed; the engine holds
#: several plugins, each by its own name.
SUMMARIES: Mapping[str, str] = MappingProxyType(
    {
        # [[[cog from tests.support import first_party; cog.outl('\n'.join(first_party.summaries())) ]]]
        "scaler=none": "Losses are not scaled. Right for fp32 and bf16, whose exponent range holds small gradients.",
        "optimizer=adamw": "Replicated data parallelism with all-reduce; AdamW, or another rule such as SGD or Muon.",
        "schedule=sequential": "One stage, one microbatch after the other.",
        "parallel-layer=dense": "Unsplit layers on one rank, and the reference for every other factory.",
        "graph-capture=none": "Every segment runs eagerly.",
        "model=gpt": "A decoder-only transformer, GPT-2 by default, Llama-like by options.",
        "data=mock": "Synthetic sequences with a structure that a model can learn, and a best loss that is known.",
        "data=text": "Text files as bytes or through a tokenizer, split by document and packed into samples.",
        "observer=console": (
            "Shows progress as a bar on a terminal or in a notebook, elsewhere as a bounded number of lines."
        ),
        "observer=jsonl": "Steps in metrics.jsonl, evaluations in eval.jsonl, samples in samples.jsonl.",
        "megatron-run-data-indexed": (
            "Datasets in Megatron's .bin and .idx files: memory-mapped, shuffled, split by document and blended."
        ),
        "megatron-run-data-instruct": (
            "Conversations as JSON lines, through a chat template, packed; loss on responses only."
        ),
        "megatron-run-data-nlu": (
            "MNLI, QQP, SQuAD 1.1 and 2.0 and RACE from their published files, with their official metrics."
        ),
        "megatron-run-data-sentence-pairs": (
            "Pairs of text in or out of order, with whole-word n-gram masking, from Megatron's indexed datasets."
        ),
        "megatron-run-data-span-corruption": (
            "What T5 learns from: runs of tokens that the decoder restores, from indexed datasets."
        ),
        "megatron-run-format-distributed": "Folders of torch.distributed.checkpoint, with masters and moments.",
        "megatron-run-format-huggingface": (
            "Models of Hugging Face: GPT-2, Llama and their relatives, read and written as transformers does; their "
            "adapters, as PEFT does."
        ),
        "megatron-run-format-megatron": (
            "Megatron-LM: import its checkpoints, turn its launch scripts into configurations."
        ),
        "megatron-run-graph-capture-compile": "Compiles parts of each layer with torch.compile.",
        "megatron-run-graph-capture-partial": (
            "Captures parts of each layer as graphs and replays them: CUDA graphs, or tapes on a CPU."
        ),
        "megatron-run-graph-capture-te": (
            "Captures parts of each layer with Transformer Engine's make_graphed_callables."
        ),
        "megatron-run-model-bert": (
            "BERT: a bidirectional encoder with masked-token and sentence-order losses, and its heads for fine-tuning."
        ),
        "megatron-run-model-deepseek": (
            "A decoder with multi-head latent attention and multi-token prediction, as in DeepSeek-V2 and V3."
        ),
        "megatron-run-model-t5": "T5: an encoder and a decoder of different lengths, with relative position biases.",
        "megatron-run-observer-mlflow": "Losses, rates and the resolved run on an MLflow server.",
        "megatron-run-observer-profiler": (
            "torch's profiler over chosen steps: operators, memory, ranges for NVIDIA's tools."
        ),
        "megatron-run-observer-tensorboard": (
            "Losses, rates, the resolved run and the pipeline timeline in TensorBoard."
        ),
        "megatron-run-observer-trace": "A step of the pipeline as it really ran, beside its plan, for Perfetto.",
        "megatron-run-observer-wandb": "Losses, rates and the resolved run in Weights & Biases.",
        "megatron-run-optimizer-deepspeed": (
            "DeepSpeed's ZeRO stages 1 and 2 as the data-parallel optimizer, without its engine."
        ),
        "megatron-run-optimizer-zero1": (
            "The distributed optimizer (ZeRO-1): every data-parallel rank updates its share, by AdamW, SGD or Muon."
        ),
        "megatron-run-optimizer-zero3": (
            "The distributed optimizer by segments (ZeRO-3): parameters and gradients are whole only while a layer "
            "needs them; AdamW, SGD or Muon."
        ),
        "megatron-run-parallel-layer-context": (
            "Context parallelism: attention over sequences whose tokens are split over ranks."
        ),
        "megatron-run-parallel-layer-fp8": "Linear layers that multiply in FP8, without another library.",
        "megatron-run-parallel-layer-lora": "Low-rank adapters (LoRA) on the layers of any other factory.",
        "megatron-run-parallel-layer-te": (
            "Tensor-parallel layers of NVIDIA Transformer Engine: fused norm and product, fused attention, FP8."
        ),
        "megatron-run-parallel-layer-tensor": "Tensor-parallel layers as in Megatron-LM, with sequence parallelism.",
        "megatron-run-scaler-constant": "The loss scale of your choice, for the whole run.",
        "megatron-run-scaler-dynamic": (
            "The largest loss scale at which 16-bit gradients stay finite, found as the run goes."
        ),
        "megatron-run-schedule-1f1b": "The 1F1B pipeline schedule: one forward, one backward.",
        "megatron-run-schedule-gpipe": "The GPipe pipeline schedule: all forwards, then all backwards.",
        "megatron-run-schedule-interleaved": (
            "The interleaved 1F1B pipeline schedule: several chunks a stage, a smaller bubble."
        ),
        "megatron-run-schedule-zero-bubble": (
            "Zero-bubble pipeline schedules: weight gradients fill the time that stages would wait."
        ),
        # [[[end]]]
    }
)


#: First-party commands and groups of them, by the names of their entry points, with the distribution that brings each.
KNOWN_COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        # [[[cog from tests.support import first_party; cog.outl('\n'.join(first_party.known_commands())) ]]]
        "data": "megatron-run-data-indexed",
        "data.cache": "megatron-run-engine",
        "eval": "megatron-run-inference",
        "export": "megatron-run-engine",
        "generate": "megatron-run-inference",
        "import": "megatron-run-engine",
        "plan": "megatron-run-planner",
        "report": "megatron-run-report",
        "sweep": "megatron-run-sweep",
        # [[[end]]]
    }
)
#: The line of each in the help, as its package says: a list of commands imports none of these packages.
COMMAND_SUMMARIES: Mapping[str, str] = MappingProxyType(
    {
        # [[[cog from tests.support import first_party; cog.outl('\n'.join(first_party.command_summaries())) ]]]
        "data": "Prepare, inspect and convert datasets; train tokenizers.",
        "data.cache": "List the tokens that data=text keeps for later starts.",
        "eval": "Evaluate a model on texts, or find them in training data.",
        "export": "Write a saved step as the new FOLDER, in another format.",
        "generate": "Continue PROMPTs with a trained model, or answer with --chat.",
        "import": "Write the model at SOURCE as the new FOLDER, to train it.",
        "plan": "Find the fastest way to run a model on given devices.",
        "report": "Write one HTML file about a run or two, or print a table.",
        "sweep": "Train with several values of some keys, and compare the runs.",
        # [[[end]]]
    }
)


def known_plugin(kind: str, name: str) -> Known | None:
    """The first-party plugin of that kind and name, installed or not."""
    return next((known for known in KNOWN if (known.kind, known.name) == (kind, name)), None)


def known_providers(ability: str) -> tuple[Known, ...]:
    """First-party packages that provide ``ability``."""
    return tuple(known for known in KNOWN if ability in known.provides and not known.builtin)
