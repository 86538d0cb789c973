"""The sections ``parallel-layer`` and ``graph-capture``: who computes the layers, in FP8 or not, captured or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from megatron_run_format_megatron.launch_script.settings import Arguments, Setting, given_or_default

#: Megatron's FP8 recipes by the names of ``parallel-layer=te``.
_RECIPES: Mapping[str, str] = MappingProxyType(
    {"delayed": "delayed", "tensorwise": "current", "mxfp8": "mxfp8", "blockwise": "block"}
)
#: Megatron's ways between context-parallel ranks by the names of ``parallel-layer=context``.
_METHODS: Mapping[str, str] = MappingProxyType({"p2p": "ring", "all_gather": "all_gather", "a2a": "ulysses"})
_FORMATS = ("hybrid", "e4m3")
_CAPTURES: Mapping[str, str] = MappingProxyType({"local": "partial", "transformer_engine": "te"})
#: Megatron's scopes that are segments here, with and without experts.
_DENSE, _EXPERTS = ("attn", "mlp"), ("moe_router", "moe_preprocess")


def layers(arguments: Arguments) -> Iterator[Setting]:
    """The section ``parallel-layer``: ``te`` for FP8, ``tensor`` for tensor parallelism, else the default.

    For context parallelism ``context`` is stacked on it.
    """
    given = arguments.get
    tensor, pieces = (given(f"{axis}_parallel_size", 1) > 1 for axis in ("tensor_model", "context"))
    base, why = ("tensor", "serves parallel.tensor") if tensor else ("dense", "")
    if _recipe(arguments) is not None:
        base, why = "te", "--fp8-format: Transformer Engine computes FP8"
    if pieces:
        whys = [each for each in (why, "context serves parallel.context") if each]
        yield Setting("parallel-layer.use", [base, "context"], ", ".join(whys))
    elif why:
        yield Setting("parallel-layer.use", base, why)
    if pieces and _method(arguments):
        yield Setting("parallel-layer.method", _method(arguments), "--cp-comm-type")
    if _recipe(arguments) is None:
        return
    recipe = given_or_default(arguments, "parallel-layer.fp8", "--fp8-recipe", "delayed")
    yield recipe._replace(value=_RECIPES[recipe.value])
    yield Setting("parallel-layer.fp8_format", arguments["fp8_format"], "--fp8-format")
    if recipe.value == "delayed":
        yield given_or_default(arguments, "parallel-layer.fp8_margin", "--fp8-margin", 0)
        yield given_or_default(arguments, "parallel-layer.fp8_amax_history", "--fp8-amax-history-len", 1)
        yield given_or_default(arguments, "parallel-layer.fp8_amax", "--fp8-amax-compute-algo", "most_recent")


def _method(arguments: Arguments) -> str | None:
    """The method of ``--cp-comm-type`` by our name; None for others, one for each layer, or none said."""
    given = set(arguments.get("cp_comm_type") or ())
    return _METHODS.get(given.pop()) if len(given) == 1 else None


def _recipe(arguments: Arguments) -> str | None:
    """The FP8 recipe by our name; None without FP8, or for what no recipe here does."""
    asked = arguments.get("fp8_format") in _FORMATS
    return _RECIPES.get(arguments.get("fp8_recipe", "delayed")) if asked else None


def capture(arguments: Arguments) -> Iterator[Setting]:
    """The section ``graph-capture``; nothing without CUDA graphs, or where they cannot be had (:func:`faults`)."""
    chosen, why = _captured_by(arguments)
    if chosen is None or _excluded(arguments):
        return
    yield Setting("graph-capture.use", chosen, why)
    named = bool(arguments.get("cuda_graph_scope"))
    scope = [name for name in _scope(arguments) if name in _segments(arguments)] or list(_segments(arguments))
    yield Setting(
        "graph-capture.scope", scope, "--cuda-graph-scope" if named else "Megatron's default of --cuda-graph-scope"
    )
    yield given_or_default(arguments, "graph-capture.capture_after", "--cuda-graph-warmup-steps", 3)


def _captured_by(arguments: Arguments) -> tuple[str | None, str]:
    given = arguments.get
    if given("cuda_graph_impl"):
        return _CAPTURES.get(arguments["cuda_graph_impl"]), "--cuda-graph-impl"
    if given("external_cuda_graph"):
        return "te", "--external-cuda-graph"
    return ("partial", "--enable-cuda-graph") if given("enable_cuda_graph") else (None, "")


def _scope(arguments: Arguments) -> list[str]:
    """The names of the scope: words, or one word with commas. ``full`` is Megatron's older name of a whole layer."""
    scopes = [name for scope in arguments.get("cuda_graph_scope") or () for name in scope.split(",") if name]
    return [name for scope in scopes for name in (_segments(arguments) if scope == "full" else (scope,))]


def _segments(arguments: Arguments) -> tuple[str, ...]:
    """The segments of a whole layer that can be captured: not what depends on how many tokens an expert got."""
    return ("attn", *_EXPERTS) if arguments.get("num_experts") else _DENSE


def _excluded(arguments: Arguments) -> str:
    """Why graphs cannot be captured in this run; empty where they can."""
    given = arguments.get
    if given("recompute_granularity") == "full" or given("checkpoint_activations"):
        return "layers that are recomputed in the backward run eagerly"
    if _recipe(arguments) == "delayed":
        return "delayed FP8 scales are renewed once after a whole forward: take parallel-layer.fp8=current to capture"
    return ""


def faults(arguments: Arguments) -> Iterator[tuple[str, str, bool]]:
    """Flags that become nothing here: the flag as written, why, and whether what is learned differs by it."""
    given = arguments.get
    if given("fp8_format") and _recipe(arguments) is None:
        written = f"--fp8-format {given('fp8_format')} --fp8-recipe {given('fp8_recipe', 'delayed')}"
        yield written, f"formats are {', '.join(_FORMATS)}, recipes {', '.join(_RECIPES)}: the run is not in FP8", True
    ways = given("cp_comm_type")
    if ways and given("context_parallel_size", 1) > 1 and _method(arguments) is None:
        text = f"all layers have one of {', '.join(_METHODS)}: parallel-layer.method is its default"
        yield f"--cp-comm-type {' '.join(ways)}", text, False
    impl = given("transformer_impl")
    if impl and _recipe(arguments) is None:
        text = {
            "transformer_engine": "layers are torch's; Transformer Engine's, on a GPU: --plugin parallel-layer=te",
            "local": "layers are torch's",
        }.get(impl, "layers are torch's; --plugin parallel-layer=te takes Transformer Engine's")
        yield f"--transformer-impl {impl}", text, False
    elif impl and impl != "transformer_engine":
        yield f"--transformer-impl {impl}", "FP8 takes Transformer Engine's layers", False
    chosen, why = _captured_by(arguments)
    if chosen is None:
        return
    if _excluded(arguments):
        written = f"{why} {given('cuda_graph_impl')}" if given("cuda_graph_impl") else why
        yield written, f"no graphs are captured: {_excluded(arguments)}", False
    left = [name for name in _scope(arguments) if name not in _segments(arguments)]
    if left:
        text = f"regions of a layer are captured, of this model's {', '.join(_segments(arguments))}"
        yield f"--cuda-graph-scope {' '.join(left)}", text, False
