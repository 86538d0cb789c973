"""The feed-forward half of a block as a mixture of experts: ``route``, ``place``, dispatch, ``compute``, ``combine``.

Legend: s sequence (s/t under sequence parallelism), b micro batch, h hidden, n = s*b tokens of the whole sequence, e
experts, k experts of a token, m rows of this rank's experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron_run.contracts import ParameterSpec
from megatron_run_engine.nn.linear import linear
from megatron_run_engine.nn.mlp import Experts, Mlp
from megatron_run_engine.nn.moe.dispatch import held_experts, make_dispatcher
from megatron_run_engine.nn.moe.placement import padded, place_all, place_within_capacity, spread
from megatron_run_engine.nn.moe.router import Router, balance_loss, choose, load_of, z_loss
from megatron_run_engine.nn.norm import norm_of
from megatron_run_engine.nn.parameter import empty_parameter

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from megatron_run.contracts import Decoding, ParallelLayers
    from megatron_run_engine.nn.spec import ExpertSpec, TransformerSpec
    from megatron_run_engine.runtime.comm import ParallelGroup
    from megatron_run_engine.runtime.context import BuildContext
    from megatron_run_engine.runtime.metrics import Meter, Metrics


#: Metrics as observers see them: tokens of the fullest and the emptiest expert over the mean, and the dropped share.
SPREAD = ("model/expert_load_max", "model/expert_load_min", "model/drop_rate")


class RouterReports:
    """Combines the reports of a chunk's expert layers for one microbatch, and balances the biases of their routers.

    Each of the ``parts`` tensor-parallel ranks reports 1/``parts`` of every auxiliary loss. Biases follow the choices
    of all ``replicas``, the data-parallel ranks.
    """

    def __init__(self, metrics: Metrics, spec: ExpertSpec, parts: int, replicas: ParallelGroup) -> None:
        self._meters: list[Meter] = [metrics.scalar(name) for name in SPREAD]
        coefficients = {"model/balance_loss": spec.balance, "model/z_loss": spec.z}
        self._weights = {name: coefficients[name] / parts for name in spec.loss_names}
        self._replicas = replicas
        self._choices: dict[Router, Tensor] = {}  # of this rank's microbatches since the last update, [e] int64

    def watch(self, routers: Iterable[Router]) -> None:
        """Count the choices of those among ``routers`` that have biases."""
        for router in routers:
            if router.expert_bias is not None:
                self._choices[router] = torch.zeros_like(router.expert_bias, dtype=torch.int64)

    def count(self, layers: Sequence[Mapping[str, Tensor]], routers: Sequence[Router]) -> None:
        """Add the spread of the load, averaged over layers and microbatches, to the step's metrics.

        ``routers`` are those of ``layers``, in their order.
        """
        if layers:
            total = torch.stack([layer["spread"] for layer in layers]).sum(0)
            for meter, value in zip(self._meters, total, strict=True):
                meter.add(value, len(layers))
        for layer, router in zip(layers, routers, strict=True):
            if router in self._choices:
                self._choices[router] += layer["choices"]

    def balance(self, *, skipped: bool) -> None:
        """Move every bias by the step's choices, unless the step is ``skipped``, and count anew. Collective.

        A frozen bias stays: it is of the weights that adapters adapt, and saved steps of adapters do not hold it.
        """
        # Layers freeze parameters after the chunk that watches the routers is made: so it is decided here.
        routers = [each for each in self._choices if each.expert_bias is not None and each.expert_bias.requires_grad]
        if routers and not skipped:
            choices = torch.stack([self._choices[router] for router in routers])
            for router, load in zip(routers, self._replicas.sum_(choices), strict=True):
                router.balance(load)
        for counted in self._choices.values():
            counted.zero_()

    def losses(self, layers: Sequence[Mapping[str, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
        """By loss name, the sum over ``layers`` with its coefficient, and a weight.

        The weight contains the coefficient too, so that the reported mean, sum over weight, does not.
        """
        if not layers:
            return {}
        return {
            name: (
                total := torch.stack([layer[name] for layer in layers]).sum(),
                total.new_full((), len(layers) * weight),
            )
            for name, weight in self._weights.items()
        }


class MixtureOfExperts(nn.Module):
    """Norm, router, experts and the shared expert, from ``route`` to ``combine``.

    ``route`` enters one tensor-parallel region and ``combine`` leaves it. Inside, every tensor-parallel rank routes all
    tokens identically and holds a part of each of its experts.
    """

    def __init__(
        self, context: BuildContext, layers: ParallelLayers, spec: TransformerSpec, experts: ExpertSpec
    ) -> None:
        super().__init__()
        self.spec, self._enter, self._leave = experts, layers.enter_region, layers.leave_region
        self._parts_of_a_loss = context.topology.sizes.tensor
        peers = context.groups.parallel_group(context.topology, "expert")
        self._pieces = context.groups.parallel_group(context.topology, "context")
        self.norm = norm_of(layers, spec)
        self.router = Router(context, spec, experts)
        self.experts = Experts(layers, spec, held_experts(peers, experts.count), experts.ffn)
        self.dispatcher = make_dispatcher(experts, peers, on_device=self.experts.takes_device_counts)
        self.shared = SharedExpert(context, layers, spec, experts) if experts.shared_ffn else None

    def route(self, x: Tensor) -> tuple[Tensor, ...]:
        """The residual stream [s, b, h] -> tokens [n, h], weights and chosen [n, k], load [e], losses, stream.

        The losses are one scalar for each of ``spec.loss_names``: this tensor-parallel rank's part, coefficient
        included. The last result, only with a shared expert, is the stream after the norm [s, b, h].
        """
        y = self.norm(x)
        tokens = self._enter(y).flatten(0, 1)
        logits = self.router(tokens)
        weights, chosen, scores = choose(logits, self.spec, self.router.expert_bias)
        load = load_of(chosen, self.spec.count)
        shared = () if self.shared is None else (y,)
        return tokens, weights, chosen, load, *self._losses(logits, scores, load), *shared

    def place(
        self, weights: Tensor, chosen: Tensor, load: Tensor, decoding: Decoding | None = None
    ) -> tuple[Tensor, ...]:
        """The placement (order [n*k], place [n*k], counts [e]), the spread of the load [3] and, for biases, load."""
        # Outside of training the tokens of a pass are those of other texts too: what is dropped would depend on them.
        dropping = self.training and decoding is None
        if self.spec.capacity_factor is None or not dropping:
            placement = place_all(chosen, load)
        else:
            placement = place_within_capacity(chosen, weights, load, self.spec)
        if self.spec.pad:
            placement = padded(placement, self._slots(chosen, load, dropping=dropping))
        # A copy: a captured segment may not return an input, and a region not what its own segments read.
        choices = () if self.router.expert_bias is None else (load.clone(),)
        return *placement, spread(load, placement.counts), *choices

    def _slots(self, chosen: Tensor, load: Tensor, *, dropping: bool) -> int:
        """Slots of an expert: its capacity or, where nothing is dropped, as many as the fullest one of any rank fills.

        Outside of training they may be read on the host: only training is captured.
        """
        if dropping:
            return self.spec.capacity(len(chosen))
        return int(self.dispatcher.peers.gather(load.max()[None]).max())

    def compute(self, rows: Tensor, weights: Tensor, *carried: Tensor) -> Tensor:
        """Apply the experts to their rows [m, h] and return the results to the tokens' ranks."""
        results = self.experts(rows, self.dispatcher.count(rows, *carried))
        return self.dispatcher.collect(results, weights, *carried)

    def combine(
        self, batch: int, returned: Tensor, weights: Tensor, order: Tensor, place: Tensor, *y: Tensor
    ) -> Tensor:
        """Each token's weighted sum over its experts, plus the shared expert on ``y``: -> [s, b, h], b = ``batch``."""
        sums = self.dispatcher.combine(returned, weights, order, place)  # [n, h]
        out = self._leave(sums.unflatten(0, (-1, batch)))
        return out if self.shared is None else out + self.shared(*y)

    def _losses(self, logits: Tensor, scores: Tensor, load: Tensor) -> list[Tensor]:
        spec, losses = self.spec, []
        if spec.balance:
            # The choices of all pieces of the samples; their mean scores are averaged with the losses of the ranks.
            load, choices = self._pieces.sum_(load.clone()), self._pieces.size * scores.shape[0] * spec.top_k
            losses.append(spec.balance / self._parts_of_a_loss * balance_loss(scores, load, choices))
        if spec.z:
            losses.append(spec.z / self._parts_of_a_loss * z_loss(logits))
        return losses


class SharedExpert(nn.Module):
    """The shared expert: a feed-forward network for every token (Dai et al. 2024, "DeepSeekMoE"), optionally gated."""

    def __init__(
        self, context: BuildContext, layers: ParallelLayers, spec: TransformerSpec, experts: ExpertSpec
    ) -> None:
        super().__init__()
        self.mlp = Mlp(layers, spec, experts.shared_ffn, "model.experts.shared.ffn_size")
        self.gate = Gate(context, spec) if experts.shared_gate else None

    def forward(self, y: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]."""
        out: Tensor = self.mlp(y)
        return out if self.gate is None else out * self.gate(y)


class Gate(nn.Module):
    """One weight per token, ``sigmoid(y @ weight.T)``, as in Qwen's mixtures; each rank computes its own tokens'."""

    def __init__(self, context: BuildContext, spec: TransformerSpec) -> None:
        super().__init__()
        self.gradients = context.gradients
        self.weight = empty_parameter(context, 1, spec.hidden)
        split = context.sequence_shards > 1
        self.parameter_specs = {"weight": ParameterSpec(spec.init, partial_over="tensor" if split else None)}

    def forward(self, y: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, 1]."""
        return linear(y, self.weight, None, self.gradients).sigmoid()
