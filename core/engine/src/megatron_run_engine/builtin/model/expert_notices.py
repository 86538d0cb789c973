"""Notices about options of a mixture that have no effect, and about a capacity that drops most choices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.errors.wording import plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_run.contracts.schema import Config
    from megatron_run_engine.builtin.model.gpt_options import GptOptions

#: A capacity factor below this drops most choices.
_LOW_CAPACITY = 0.5


def expert_notices(config: Config, options: GptOptions) -> Iterator[str]:
    """Yield notices about options without effect, and about a capacity that drops most choices."""
    experts, name = options.experts, "model.experts"
    if not experts.count:
        if idle := experts.idle:
            yield f"{', '.join(f'{name}.{key}' for key in idle)}: without {name}.count nothing reads it"
        return
    if config.parallel.expert == 1 and experts.dispatcher != "alltoall":
        yield f"{name}.dispatcher changes nothing: with parallel.expert=1 every rank holds all experts"
    if experts.shared.gate and not experts.shared.ffn_size:
        yield f"{name}.shared.gate changes nothing: without {name}.shared.ffn_size there is no shared expert"
    yield from _about_router(options)
    yield from _about_layers(options)
    yield from _about_capacity(config, options)


def _about_router(options: GptOptions) -> Iterator[str]:
    router, name = options.experts.router, "model.experts.router"
    if router.pre_softmax and router.score_function != "softmax":
        yield f"{name}.pre_softmax changes nothing: {name}.score_function={router.score_function} has no softmax"
    if not router.norm_weights and router.score_function != "sigmoid":
        yield (
            f"{name}.norm_weights changes nothing: with {name}.score_function=softmax, "
            f"{name}.pre_softmax says whether weights are normalised over all experts or over the chosen ones"
        )


def _about_layers(options: GptOptions) -> Iterator[str]:
    layers, pattern, freq = options.num_layers, options.experts.layer_pattern, options.experts.layer_freq
    if len(pattern) > layers:
        yield (
            f"model.experts.layer_pattern has {plural(len(pattern), 'value')} for {plural(layers, 'layer')}: "
            f"those after the first {layers} do nothing"
        )
    if freq > layers:
        yield f"model.experts.layer_freq={freq} is above model.num_layers={layers}: layer 0 alone has experts"


def _about_capacity(config: Config, options: GptOptions) -> Iterator[str]:
    experts = options.experts
    factor, count = experts.capacity_factor, experts.count
    if factor is None:
        if experts.drop_policy != "probs":
            yield (
                f"model.experts.drop_policy={experts.drop_policy} changes nothing: without "
                "model.experts.capacity_factor no token is dropped"
            )
        return
    if config.parallel.context > 1:
        yield (
            f"model.experts.capacity_factor={factor:g} counts the tokens of a rank's pieces: with parallel.context="
            f"{config.parallel.context} other tokens are dropped than with 1"
        )
    if factor < _LOW_CAPACITY:
        tokens = config.train.micro_batch_size * config.train.sequence_length // config.parallel.context
        capacity, choices = experts.spec(options.num_layers, 1).capacity(tokens), tokens * experts.top_k
        kept = count * capacity
        yield (
            f"model.experts.capacity_factor={factor:g} drops most choices: {count} experts x {capacity} tokens keep "
            f"at most {kept:,} of the {choices:,} choices of a microbatch, {kept / choices:.0%}"
        )
