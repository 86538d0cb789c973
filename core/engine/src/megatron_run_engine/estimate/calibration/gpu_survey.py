"""The survey of one GPU for the planner, and how long that takes: within a minute.

Operators say what the device reaches on shapes of layers; trainings of a few steps say the rest: products beside other
kernels, what the host needs for a layer, small kernels. They are bound by products, by the loss, and by launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from megatron_run.config.request import Request

#: (rows, columns, depth) of products of layers of 768 to 8192 features, and of a head.
PRODUCTS = (
    (2048, 768, 768), (2048, 3072, 768), (16384, 2304, 768), (16384, 768, 3072), (16384, 50304, 768),
    (4096, 4096, 1024), (16384, 1024, 4096), (2048, 2048, 2048), (8192, 6144, 2048), (8192, 2048, 8192),
    (8192, 8192, 2048), (4096, 10240, 2560), (4096, 2560, 10240), (4096, 4096, 4096), (8192, 8192, 8192),
)  # fmt: skip
#: Bytes read and written.
SWEEPS = (2**22, 2**24, 2**26, 2**28, 2**30)
#: (micro batch, heads, sequence, head size)
ATTENTION = ((16, 12, 1024, 64), (4, 16, 2048, 128), (1, 32, 4096, 128))
#: Steps of a training that count, and those before them: kernels are chosen and compiled, and the state is made.
STEPS, FIRST = 5, 3


class Training(NamedTuple):
    """A GPT in bf16 of so many sequences a step; few layers tell as much as many."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    micro_batch: int
    microbatches: int
    vocabulary: int = 50304

    def request(self) -> Request:
        """The training as a request."""
        sets = {
            "model.num_layers": self.layers,
            "model.hidden_size": self.hidden,
            "model.num_heads": self.heads,
            "model.dropout": 0.0,
            "train.precision": "bf16",
            "train.sequence_length": self.sequence,
            "train.micro_batch_size": self.micro_batch,
            "train.global_batch_size": self.micro_batch * self.microbatches,
            "train.steps": 1000,
            "data.vocab_size": self.vocabulary,
            "eval.interval": 0,
            "run.device": "cuda",
        }
        return Request(configs=("preset:tiny",), sets=tuple(f"{key}={value}" for key, value in sets.items()))

    @property
    def flops(self) -> float:
        """Of a step, forward and backward, all scores counted."""
        tokens = self.micro_batch * self.microbatches * self.sequence
        layer = 12 * self.hidden**2 + 2 * self.sequence * self.hidden
        return 6.0 * tokens * (self.layers * layer + self.vocabulary * self.hidden)


#: The loss, layers of 64 and of 128 features a head, large layers on few tokens, and launches.
TRAININGS = (
    Training(4, 768, 12, 1024, 16, 2),
    Training(8, 1024, 16, 1024, 16, 2),
    Training(8, 2048, 16, 2048, 4, 2),
    Training(6, 2560, 20, 2048, 2, 2),
    Training(8, 512, 8, 512, 2, 4, 8192),
)


class Clock(Protocol):
    """The measuring clock: :class:`~megatron_run_engine.estimate.calibration.gpu_clock.GpuClock`, on a CUDA device."""

    name: str
    memory: float
    peak: float

    def product(self, rows: int, columns: int, depth: int) -> float:
        """Seconds of a product in bf16."""

    def sweep(self, size: int) -> float:
        """Seconds of a kernel that reads and writes ``size`` bytes."""

    def attention(self, micro_batch: int, heads: int, sequence: int, head_size: int) -> tuple[float, float]:
        """Seconds of causal attention, forward and backward."""

    def kernel(self) -> float:
        """Seconds of the shortest kernel."""

    def training(self, request: Request, steps: int, first: int) -> float:
        """Seconds of a step."""


def survey_gpu(clock: Clock, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure by ``clock``; ``say`` is told what. The result has the fields of the planner's ``GpuSurvey``."""
    say("products, passes over memory and attention")
    products = [(*shape, clock.product(*shape)) for shape in PRODUCTS]
    sweeps = [(size, clock.sweep(size)) for size in SWEEPS]
    attention = [(*shape, *clock.attention(*shape)) for shape in ATTENTION]
    kernel = clock.kernel()
    trainings = []
    for index, each in enumerate(TRAININGS, 1):
        say(f"a training of {each.layers} layers of {each.hidden} ({index} of {len(TRAININGS)})")
        request = each.request()
        seconds = clock.training(request, STEPS, FIRST)
        trainings.append({"request": request.to_json(), "ranks": 1, "seconds": seconds})
    return {
        "name": clock.name,
        "memory": clock.memory,
        "peak": clock.peak,
        "products": products,
        "sweeps": sweeps,
        "attention": attention,
        "kernel": kernel,
        "trainings": trainings,
    }
