"""The section ``model`` that Megatron's arguments describe, be they a script's flags or saved in a checkpoint.

Arguments have Megatron's names (``num_attention_heads``); a missing one has Megatron's default.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_run.config.yaml import flow
from megatron_run_format_megatron.launch_script.attention_section import (
    FIXED_BY_LATENTS,
    attention,
    attention_faults,
    is_latent,
)
from megatron_run_format_megatron.launch_script.flags import FLAGS
from megatron_run_format_megatron.launch_script.settings import (
    Arguments,
    Setting,
    default_of,
    given_keys,
    given_or_default,
    layer_pattern,
)

_DISPATCHERS = ("alltoall", "allgather")
_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}


def network(arguments: Arguments) -> Iterator[Setting]:
    """The keys of the section ``model``, without experts and dropout; none that the model cannot have."""
    fixed = FIXED_BY_LATENTS if is_latent(arguments) else {}
    return (each for each in _network(arguments) if each.value == fixed.get(each.key, each.value))


def _network(arguments: Arguments) -> Iterator[Setting]:
    given = arguments.get
    if is_latent(arguments):
        yield Setting("model.use", "deepseek", "--multi-latent-attention")
    yield from given_keys(arguments, "model")
    yield from attention(arguments)
    yield from _ffn(arguments)
    norm = _NORMS.get(given("normalization") or "")
    yield Setting("model.norm.kind", norm or "layernorm", "--normalization" if norm else default_of("--normalization"))
    yield _activation(arguments)
    yield _cleared("model.bias", "--disable-bias-linear", cleared=not given("add_bias_linear", True))
    untied = bool(given("untie_embeddings_and_output_weights"))
    yield _cleared("model.tie_embeddings", "--untie-embeddings-and-output-weights", cleared=untied)


def network_faults(arguments: Arguments) -> Iterator[str]:
    """Every reason why this network has no counterpart here, a line each."""
    for flag in FLAGS:
        value = arguments.get(flag.stored)
        if flag.network and flag.differs(value):
            yield f"{flag.name}{'' if value is True else f' {value}'}: {flag.text}"
    yield from attention_faults(arguments)
    given = arguments.get
    if given("normalization") not in (None, *_NORMS):
        yield f"--normalization {given('normalization')}: it is LayerNorm or RMSNorm"
    for key, value, why in _network(arguments) if is_latent(arguments) else ():
        fixed = FIXED_BY_LATENTS.get(key, value)
        if value != fixed:
            yield f"{why}: with latent attention {key} is {flow(fixed)}, not {flow(value)}"


def _cleared(key: str, flag: str, *, cleared: bool) -> Setting:
    """A key that is true unless ``flag`` clears it."""
    return Setting(key, not cleared, flag if cleared else f"Megatron's default; {flag} clears it")


def _ffn(arguments: Arguments) -> Iterator[Setting]:
    size, hidden = arguments.get("ffn_hidden_size"), arguments.get("hidden_size")
    if size is not None:
        yield Setting("model.ffn_size", size, "--ffn-hidden-size")
    elif arguments.get("swiglu") and hidden is not None:
        yield Setting(
            "model.ffn_size", hidden * 8 // 3 // 64 * 64, "--swiglu: two thirds of four times the hidden size"
        )


def _activation(arguments: Arguments) -> Setting:
    """The activation. Megatron fuses bias and GeLU by default, and that kernel computes the tanh form."""
    given = arguments.get
    if given("swiglu"):
        return Setting("model.activation", "swiglu", "--swiglu")
    if given("squared_relu"):
        return Setting("model.activation", "relu_squared", "--squared-relu")
    if given("openai_gelu"):
        return Setting("model.activation", "gelu_tanh", "--openai-gelu")
    if given("add_bias_linear", True) and given("bias_gelu_fusion", True):
        return Setting("model.activation", "gelu_tanh", "Megatron's default: what its fused bias and GeLU computes")
    flag = "--no-bias-gelu-fusion" if given("add_bias_linear", True) else "--disable-bias-linear"
    return Setting("model.activation", "gelu", f"{flag}: not fused with a bias")


def experts(arguments: Arguments) -> Iterator[Setting]:
    """The keys of the section ``model`` for a mixture of experts; none for a dense model."""
    given = arguments.get
    if not given("num_experts"):
        return
    yield Setting("model.experts.count", given("num_experts"), "--num-experts")
    yield from given_keys(arguments, "model", "--moe-")
    yield from _choice(arguments)
    if (kind := given("moe_router_load_balancing_type", "aux_loss")) == "aux_loss":
        yield given_or_default(arguments, "model.experts.aux_loss_coeff", "--moe-aux-loss-coeff", 0.0)
    else:
        yield Setting("model.experts.aux_loss_coeff", 0.0, f"--moe-router-load-balancing-type {kind}")
    # A text in a script, a number or a list in a checkpoint.
    frequency = given_or_default(arguments, "model.experts.layer_freq", "--moe-layer-freq", 1)
    if "[" in str(frequency.value):
        yield Setting("model.experts.layer_pattern", layer_pattern(frequency.value, "--moe-layer-freq"), frequency.why)
    else:
        yield frequency._replace(value=int(frequency.value))
    dispatcher = given_or_default(arguments, "model.experts.dispatcher", "--moe-token-dispatcher-type", "allgather")
    if dispatcher.value in _DISPATCHERS:
        yield dispatcher


def _choice(arguments: Arguments) -> Iterator[Setting]:
    """The keys of groups and biases, which decide the choice of experts. A group is worth its share of the choices."""
    given = arguments.get
    if top_groups := given("moe_router_group_topk"):
        yield Setting("model.experts.router.top_groups", top_groups, "--moe-router-group-topk")
        best = int(given("moe_router_topk", 2)) // int(top_groups)
        yield Setting("model.experts.router.group_best", best, "--moe-router-topk / --moe-router-group-topk")
    if given("moe_router_enable_expert_bias"):
        yield given_or_default(arguments, "model.experts.router.bias_rate", "--moe-router-bias-update-rate", 1e-3)


def expert_faults(arguments: Arguments) -> Iterator[tuple[str, str]]:
    """Flags of experts without a counterpart here, each with the reason."""
    kind = arguments.get("moe_router_load_balancing_type", "aux_loss")
    if arguments.get("num_experts") and kind not in ("aux_loss", "none"):
        yield f"--moe-router-load-balancing-type {kind}", "tokens are spread by aux_loss, or not at all"


def dispatcher_faults(arguments: Arguments) -> Iterator[tuple[str, str]]:
    """A dispatcher without a counterpart, which changes nothing of what is learned, with the reason."""
    kind = arguments.get("moe_token_dispatcher_type")
    if arguments.get("num_experts") and kind is not None and kind not in _DISPATCHERS:
        yield f"--moe-token-dispatcher-type {kind}", f"tokens reach experts by {' or '.join(_DISPATCHERS)}"
