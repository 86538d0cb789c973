"""GPT of four sizes in bf16: tokens a second and memory of this project's training and of its peers.

Every side trains the same network on one device: random tokens, dropout 0, AdamW in one kernel, clipping. Ours keeps
16-bit weights with fp32 masters and main gradients, as megatron-core does; the others autocast over fp32 weights.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.gpu.measuring import Day, in_turn, seconds
from benchmarks.single.model import TINY, Side
from benchmarks.support.shape import Shape
from megatron_run.registry.discover import scan
from megatron_run_engine.training.peak import known_peak

GPT = {
    "124m": Shape(layers=12, hidden=768, heads=12, sequence=1024, vocab=50304, micro_batch=16, microbatches=4),
    "350m": Shape(layers=24, hidden=1024, heads=16, sequence=1024, vocab=50304, micro_batch=16, microbatches=4),
    "1.3b": Shape(layers=24, hidden=2048, heads=16, sequence=2048, vocab=50304, micro_batch=4, microbatches=4),
    "3b": Shape(layers=32, hidden=2560, heads=20, sequence=2048, vocab=50304, micro_batch=2, microbatches=4),
}
#: What is replayed from graphs: small layers, whose launches cost more than their kernels, and layers of experts.
SMALL = Shape(layers=12, hidden=512, heads=8, sequence=512, vocab=8192, micro_batch=2, microbatches=8)
EXPERTS = {"model.experts.count": 8, "model.experts.top_k": 2, "model.activation": "swiglu", "model.bias": False}
#: The settings of models of other than dense layers.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "experts": EXPERTS,
    "padded experts": {**EXPERTS, "model.experts.capacity_factor": 1.25, "model.experts.pad_to_capacity": True},
}
#: Steps whose median is the rate.
SAMPLES = 10
OURS, NANOGPT = "megatron-run", "nanoGPT, compiled"

#: Our side with plugins and settings: name -> plugins, settings, the library that it needs.
WAYS: Mapping[str, tuple[tuple[str, ...], Mapping[str, Any], str]] = {
    OURS: ((), {}, ""),
    f"{OURS}, compiled": (("graph-capture=compile",), {}, ""),
    f"{OURS}, one graph": (("graph-capture=partial,scope=step",), {}, ""),
    f"{OURS}, compiled, one graph": (("graph-capture=compile,scope=step",), {}, ""),
    f"{OURS}, FP8": (("parallel-layer=dense+fp8",), {}, ""),
    f"{OURS}, FP8, compiled": (("parallel-layer=dense+fp8", "graph-capture=compile"), {}, ""),
    f"{OURS}, FP8, compiled, one graph": (("parallel-layer=dense+fp8", "graph-capture=compile,scope=step"), {}, ""),
    f"{OURS}, Transformer Engine": (("parallel-layer=te",), {}, "transformer_engine"),
    f"{OURS}, Transformer Engine in FP8": (
        ("parallel-layer=te,fp8=current",), {}, "transformer_engine",
    ),
}  # fmt: skip
#: Of graphs: name -> plugins, the library.
CAPTURES: Mapping[str, tuple[tuple[str, ...], Mapping[str, Any], str]] = {
    "eager": ((), {}, ""),
    "partial": (("graph-capture=partial,scope={scope}",), {}, ""),
    "whole step": (("graph-capture=partial,scope=step",), {}, ""),
    "compile": (("graph-capture=compile",), {}, ""),
    "whole step, compiled": (("graph-capture=compile,scope=step",), {}, ""),
    "te": (("parallel-layer=te", "graph-capture=te,scope={scope}"), {}, "transformer_engine"),
}
SCOPES = {
    "small": "attn,mlp",
    "experts": "attn,moe_router,moe_preprocess",
    "padded experts": "attn,moe_router,moe_preprocess,moe_dispatch,moe_experts,moe_combine",
}
#: Of other programs: name -> the libraries that they need.
PEERS = {
    NANOGPT: "",
    "transformers": "transformers",
    "megatron-core": "megatron transformer_engine",
    "megatron-core, local layers": "megatron",
    "Lightning": "lightning",
}


def shape_of(size: str, *, quick: bool) -> Shape:
    """The shape of a size; tiny ones for a trial."""
    return TINY if quick else GPT.get(size, SMALL)


def piece(size: str) -> Callable[[Day], Iterator[dict[str, Any]]]:
    """The piece of ``size``: every side."""

    def measure(day: Day) -> Iterator[dict[str, Any]]:
        shape, sides = str(shape_of(size, quick=day.quick)), dict[str, Any]()
        cases = {name: {"size": size, "name": name} for name in day.wanted((*WAYS, *PEERS))}
        for name, found in in_turn(measure_side, day, cases):
            sides[name] = found
            yield {"shape": shape, "sides": sides}

    return measure


def measure_side(device: str, size: str, name: str, *, quick: bool) -> dict[str, Any]:
    """Tokens a second, FLOP/s by the model's formula, and peak memory of the side ``name``."""
    shape = shape_of(size, quick=quick)
    ways = {**WAYS, **CAPTURES}
    for library in (ways[name][2] if name in ways else PEERS[name]).split():
        if find_spec(library) is None:
            return {"failed": f"{library} is not installed"}
    flops = flops_per_token(shape, size)
    compiled = not quick or size == next(iter(GPT))  # compiling is slow, and the same for every size
    side = our_side(device, size, name, shape) if name in ways else peer(device, name, shape, compiled=compiled)
    if isinstance(side, str):
        return {"failed": side}
    batch = [
        (pair[0], pair[1])
        for pair in torch.randint(
            shape.vocab, (shape.microbatches, 2, shape.micro_batch, shape.sequence), device=device
        )
    ]
    found: list[float] = []
    taken = seconds(lambda: found.append(side.step(batch)), device, 3 if quick else SAMPLES, warm_up=4)
    side.close()
    rate = shape.microbatches * shape.micro_batch * shape.sequence / statistics.median(taken)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    sheet = known_peak(torch.cuda.get_device_name(), "bf16") if device == "cuda" else None
    return {"tokens/s": rate, "TFLOP/s": rate * flops / 1e12, "sheet": sheet, "GiB": peak, "loss": found[-1]}


def flops_per_token(shape: Shape, size: str) -> float:
    """FLOPs of forward and backward for a token, by our model's formula, for every side."""
    from megatron_run.config.values import nested
    from megatron_run_engine.builtin.model.gpt import GptOptions

    experts = nested(SETTINGS.get(size, {})).get("model", {})
    options = GptOptions(
        num_layers=shape.layers, hidden_size=shape.hidden, num_heads=shape.heads, vocab_size=shape.vocab, dropout=0.0,
        **experts,
    )  # fmt: skip
    return options.costs(shape.sequence, shape.vocab).flops_per_token


def our_side(device: str, size: str, name: str, shape: Shape) -> Side | str:
    """This project's training as ``name`` says, or why there is none here."""
    from benchmarks.single.ours import OurTraining

    plugins, sets, _ = {**WAYS, **CAPTURES}[name]
    plugins = tuple(each.format(scope=SCOPES.get(size, "")) for each in plugins)
    installed = {str(entry) for entry in scan().entries}
    choices = (each.partition(",")[0].split("=") for each in plugins)
    asked = [f"{kind}={name}" for kind, names in choices for name in names.split("+")]
    missing = [each for each in asked if each not in installed]
    if missing:
        return f"{missing[0]} is not installed"
    return OurTraining(shape, "bf16", device, {**SETTINGS.get(size, {}), **sets}, plugins)


def peer(device: str, name: str, shape: Shape, *, compiled: bool) -> Side | str:
    """A peer's training of the same network."""
    torch.manual_seed(1)
    if name == NANOGPT:
        from benchmarks.single.peers.nanogpt import nanogpt

        return nanogpt(shape, None, "bf16", device, compiled=compiled)
    if name == "transformers":
        from benchmarks.single.peers.huggingface import huggingface

        return huggingface(shape, None, "bf16", device, activation="gelu")
    if name.startswith("megatron-core"):
        from benchmarks.single.peers.megatron import MegatronLoop

        local = name.endswith("local layers")
        if device == "cpu" and not local:
            return "Transformer Engine needs a GPU"
        return MegatronLoop(shape, None, "bf16", device, local=local)
    from benchmarks.gpu.lightning_loop import LightningLoop

    return LightningLoop(shape, device, compiled=compiled)


def graphs(day: Day) -> Iterator[dict[str, Any]]:
    """The piece: eager beside captured, on small layers, on layers of experts, and on those that are padded."""
    record: dict[str, Any] = {}
    for size in SCOPES:
        sides = record.setdefault(size, {"shape": str(shape_of(size, quick=day.quick)), "sides": {}})["sides"]
        cases = {name: {"size": size, "name": name} for name in day.wanted(CAPTURES)}
        for name, found in in_turn(measure_side, day, cases):
            sides[name] = found
            yield record
