"""What is said of the options of a mixture that do nothing where they are set, or drop more than they seem to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.errors import plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_run.contracts.schema import Config
    from megatron_run_engine.builtin.model.gpt_options import GptOptions

#: Below this share of an even load, experts drop most of what they are chosen for.
_LOW_CAPACITY = 0.5


def expert_notices(config: Config, options: GptOptions) -> Iterator[str]:
    """Notices about what does nothing, and about a capacity that drops most choices."""
    if not options.experts:
        if idle := options.expert_keys:
            yield f"{', '.join(f'model.{key}' for key in idle)}: without model.experts nothing reads it"
        return
    if config.parallel.expert == 1 and options.token_dispatcher != "alltoall":
        yield "model.token_dispatcher changes nothing: with parallel.expert=1 every rank holds all experts"
    if options.shared_expert_gate and not options.shared_expert_ffn_size:
        yield "model.shared_expert_gate changes nothing: without model.shared_expert_ffn_size there is no shared expert"
    if options.router_pre_softmax and options.router_score_function != "softmax":
        score = options.router_score_function
        yield f"model.router_pre_softmax changes nothing: model.router_score_function={score} has no softmax"
    yield from _about_layers(options)
    yield from _about_capacity(config, options)


def _about_layers(options: GptOptions) -> Iterator[str]:
    layers, pattern, freq = options.num_layers, options.expert_layer_pattern, options.expert_layer_freq
    if len(pattern) > layers:
        yield (
            f"model.expert_layer_pattern has {plural(len(pattern), 'value')} for {plural(layers, 'layer')}: "
            f"those after the first {layers} do nothing"
        )
    if freq > layers:
        yield f"model.expert_layer_freq={freq} is above model.num_layers={layers}: layer 0 alone has experts"


def _about_capacity(config: Config, options: GptOptions) -> Iterator[str]:
    factor, experts = options.expert_capacity_factor, options.experts
    if factor is None:
        if options.token_drop_policy != "probs":
            yield (
                f"model.token_drop_policy={options.token_drop_policy} changes nothing: without "
                "model.expert_capacity_factor no token is dropped"
            )
        return
    if factor < _LOW_CAPACITY:
        tokens = config.train.micro_batch_size * config.train.sequence_length
        capacity, choices = options.expert_spec().capacity(tokens), tokens * options.top_k
        kept = experts * capacity
        yield (
            f"model.expert_capacity_factor={factor:g} drops most choices: {experts} experts x {capacity} tokens keep "
            f"at most {kept:,} of the {choices:,} choices of a microbatch, {kept / choices:.0%}"
        )
