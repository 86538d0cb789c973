"""Each kernel of ``megatron_run_engine.nn.fused`` beside the layer's own code, and beside a copy of as many bytes.

Of each side there are two times: that of the device alone, and that of a call, which the host may take longer to launch
than the device to run. A step whose kernels are captured in a graph, or wait in the device's queue, takes the first.

On a CPU, Triton's interpreter runs the kernels, on tiny tensors: that shows that the piece works, and nothing else.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu.measuring import Day, alone, device_seconds, seconds

#: Tokens, features and classes of GPT-2's smallest model, of which 16 sequences are a microbatch.
TOKENS, HIDDEN, VOCAB, COLUMNS = 16_384, 768, 50_257, 50_304
_TINY = (8, 32, 61, 64)


class Work(NamedTuple):
    """``call`` moves ``bytes`` at least; its module asks ``fuses``, which is answered with no for the other side."""

    module: str
    bytes: int
    call: Callable[[], object]


def measure(day: Day) -> Iterator[dict[str, Any]]:
    """The piece: of each kernel milliseconds, GB/s and GiB beside its tensors, in bf16, and those of the eager code.

    The rate is the device's.
    """
    yield alone(measure_kernels, day)


def measure_kernels(device: str, *, quick: bool) -> dict[str, Any]:
    """Both sides of each kernel on the same tensors."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    if find_spec("triton") is None:
        raise RuntimeError("Triton is not installed: both sides would be the eager code")
    samples, found = 3 if quick else 30, dict[str, Any]()
    source = torch.randn(2**14 if quick else 2**28, device=device)
    copied = 2 * source.nbytes / statistics.median(device_seconds(source.clone, device, samples))
    del source
    found["copy GB/s"] = copied / 1e9
    for name, work in _works(device, *(_TINY if quick else (TOKENS, HIDDEN, VOCAB, COLUMNS))).items():
        fused = _measured(work, device, samples)
        with mock.patch(f"megatron_run_engine.nn.{work.module}.fuses", return_value=False):
            eager = _measured(work, device, samples)
        rate = work.bytes / (fused["device ms"] / 1e3)
        found[name] = {
            **fused, **{f"eager {key}": value for key, value in eager.items()},
            "GB/s": rate / 1e9, "of a copy's rate": rate / copied,
        }  # fmt: skip
    return found


def _measured(work: Work, device: str, samples: int) -> dict[str, Any]:
    """Milliseconds of the device, and of a call; GiB at the peak beside what was there before, None on a CPU."""
    found: dict[str, Any] = {
        "device ms": 1e3 * statistics.median(device_seconds(work.call, device, samples)),
        "ms": 1e3 * statistics.median(seconds(work.call, device, samples)),
        "GiB": None,
    }
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work.call()
        found["GiB"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return found


def _works(device: str, tokens: int, hidden: int, vocab: int, columns: int) -> dict[str, Work]:
    """Forward and backward of loss, norms, GeLU, SwiGLU and rotary positions, and the gradient of a bias."""
    from megatron_run_engine.builtin.model.gpt import GptOptions
    from megatron_run_engine.nn.cross_entropy import cross_entropy
    from megatron_run_engine.nn.gelu import Gelu, activated, shared_terms
    from megatron_run_engine.nn.linear import add_rows
    from megatron_run_engine.nn.mlp import swiglu
    from megatron_run_engine.nn.norm import LayerNorm, RmsNorm
    from megatron_run_engine.nn.rotary import Rotary
    from megatron_run_engine.runtime.gradients import own_main_grad
    from megatron_run_testing.build_contexts import single_process_context

    def values(*shape: int, learnt: bool = True) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=learnt)

    def of(module: str, passes: float, function: Callable[[Tensor], Tensor], x: Tensor) -> Work:
        """Forward and backward, which read and write x so many times."""
        slope = torch.ones_like(function(x))
        return Work(module, int(passes * x.nbytes), lambda: torch.autograd.grad(function(x), x, slope))

    def of_norm(kind: type[LayerNorm | RmsNorm]) -> Work:
        norm, x = kind(context, hidden, 1e-5).to(device, torch.bfloat16), values(tokens, hidden)
        learnt, slope = (x, *norm.parameters()), torch.ones_like(x)
        for parameter in norm.parameters():
            own_main_grad(parameter)  # where the kernels leave the gradients that eager code returns
        return Work("norm", 5 * x.nbytes, lambda: torch.autograd.grad(norm(x), learnt, slope, allow_unused=True))

    def of_gelu() -> None:
        """With the gradient of the bias before it."""
        terms = shared_terms(end, inner, bias)
        (slopes,) = torch.autograd.grad(activated(inner, end, terms), inner, outer)
        add_rows(total, slopes if terms is None else terms.take())

    context, size, length = single_process_context(), min(64, hidden // 2), max(1, tokens // 16)
    labels = torch.randint(vocab, (tokens,), device=device)
    total, rows = torch.zeros(4 * hidden, device=device), values(tokens, 4 * hidden, learnt=False)
    inner, outer, end = values(tokens, 4 * hidden), values(tokens, 4 * hidden, learnt=False), Gelu()
    bias = torch.nn.Parameter(values(4 * hidden, learnt=False))
    options = GptOptions(num_layers=1, hidden_size=hidden, num_heads=hidden // size, vocab_size=5, position="rope")
    rotary = Rotary(context, options.spec(length, 5)).to(device, torch.bfloat16)
    return {
        "cross entropy": of("cross_entropy", 3, lambda x: cross_entropy(x, labels, vocab), values(tokens, columns)),
        "bias gradient": Work("linear", rows.nbytes, lambda: add_rows(total, rows)),
        "bias and GeLU": Work("gelu", 5 * inner.nbytes, of_gelu),
        "layer norm": of_norm(LayerNorm),
        "rms norm": of_norm(RmsNorm),
        "SwiGLU": of("mlp", 4, swiglu, values(tokens, 8 * hidden)),
        "rotary": of("rotary", 4, rotary, values(length, tokens // length, hidden // size, size)),
    }
