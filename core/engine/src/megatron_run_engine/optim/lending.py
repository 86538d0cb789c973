"""The optimizer on flat buffers whose parameters and gradients are whole only while a segment needs them (ZeRO-3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from megatron_run.contracts import Lender
from megatron_run_engine.optim.flat import FlatOptimizer
from megatron_run_engine.optim.loans import LentShard, LentValues, Room
from megatron_run_engine.optim.units import (
    LentGradients,
    LentParameters,
    Unit,
    most_lent,
    recomputed_together,
    units_of,
)
from megatron_run_engine.runtime.parameter_init import frozen, give_memory, initialise, trained, without_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch
    from torch import Tensor
    from torch.nn import Parameter

    from megatron_run.contracts import Chunk, ParamInfo
    from megatron_run_engine.optim.buckets import Bucket
    from megatron_run_engine.optim.sharding import Shard, ShardingStrategy
    from megatron_run_engine.optim.update import Update
    from megatron_run_engine.optim.update_rules import UpdateOptions
    from megatron_run_engine.runtime.comm import ParallelGroup, Pending
    from megatron_run_engine.runtime.context import BuildContext


class LendingOptimizer(FlatOptimizer, Lender):
    """Parameters of a segment are gathered where it runs, and its gradients are reduced when its backward ends.

    At most ``held`` segments are whole at a time; 0: from the first use in a step to its update. ``reduce`` says how
    often gradients leave: after each microbatch, or once a step. Parameters of fewer than ``whole_below`` values, those
    that no segment reads or the model itself moves, and those without another replica stay whole, as with ``zero1``.

    ``sharding`` cuts each bucket into the shares of its ranks.
    """

    def __init__(
        self,
        context: BuildContext,
        options: UpdateOptions,
        sharding: Callable[[ParallelGroup], ShardingStrategy],
        *,
        held: int = 2,
        whole_below: int = 0,
        reduce: Literal["microbatch", "step"] = "microbatch",
    ) -> None:
        super().__init__(context, options, sharding, overlap_param_gather=True)
        self._held, self._whole_below, self._each_microbatch = held, whole_below, reduce == "microbatch"
        self._seed = context.train.seed
        self._units: list[Unit] = []
        self._frozen: Sequence[dict[Parameter, ParamInfo]] = ()

    def attach(self, chunks: Sequence[Chunk], infos: Sequence[dict[Parameter, ParamInfo]], grad_scale: float) -> None:
        """Lay out the buckets of each segment, and those of the rest; give values to what was built without memory."""
        still = self._frozen or [{} for _ in infos]
        every = [{**described, **more} for described, more in zip(infos, still, strict=True)]
        read = [[segment.params for segment in chunk.segments()] for chunk in chunks]
        found = units_of(read, every, self._lends)
        self._recomputed = max(map(recomputed_together, chunks), default=0)
        lent = {parameter for _, _, described in found for parameter in described}
        rest = [{p: info for p, info in described.items() if p not in lent} for described in every]
        for described in rest:
            fresh = without_memory(described)
            give_memory(fresh)
            initialise(fresh, self._seed)
        self._units = list(self._lay_out_units(found))
        for unit in self._units:
            unit.initialise(self._seed)
        if not self._units and self._peers["replicas"].size > 1:
            self._warn(f"no parameter is lent: none that a segment reads has {self._whole_below} values or more")
        self._parameters = LentParameters(self._units, self._gather, self._held)
        self._lent_gradients = LentGradients(self._units, self._reduce, each_microbatch=self._each_microbatch)
        self._idle = [parameter for described in rest for parameter in frozen(described)]
        super().attach(chunks, [trained(described) for described in rest], grad_scale)

    def hold(self, infos: Sequence[dict[Parameter, ParamInfo]]) -> None:
        """Lend frozen parameters too: a rank keeps its share of their values."""
        self._frozen = infos

    def keep(self, parameters: Iterable[Parameter]) -> None:
        """Take over what was written to frozen ``parameters``."""
        self._parameters.keep(parameters)

    def before_adding(self, parameters: Sequence[Parameter]) -> None:
        """Give the gradients of ``parameters`` memory; those of the segment before leave."""
        self._lent_gradients.begin(parameters)

    def grad_ready(self, parameter: Parameter) -> None:
        """Send complete buckets of what stays whole; what is lent leaves by itself."""
        if parameter in self._bucket_of:
            super().grad_ready(parameter)

    def start_grad_sync(self, chunk: int) -> None:
        """Send the remaining gradients of ``chunk``."""
        super().start_grad_sync(chunk)
        self._lent_gradients.finish(chunk)

    def zero_grad(self) -> None:
        """Clear the gradients; those of all segments are due again."""
        super().zero_grad()
        self._lent_gradients.begin_step()

    def finish_grad_sync(self) -> None:
        """Wait for every reduction, those of what is lent too."""
        self._lent_gradients.finish()
        super().finish_grad_sync()

    def step(self, lr: float, weight_decay: float) -> None:
        """Update this rank's shares; what was gathered before is taken back."""
        self._parameters.forget()
        super().step(lr, weight_decay)

    def ensure_ready(self, parameters: Iterable[Parameter], *, ahead: bool = True) -> None:
        """Gather the segments of ``parameters`` that are not whole; wait for those that are on the way."""
        parameters = tuple(parameters)
        super().ensure_ready(parameters)
        self._parameters.take(parameters, ahead=ahead)

    def kept(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The parameters and reduced gradients of this rank's shares."""
        yield from ((shard.rounded, shard.reduced) for shard in self._lent_shards())

    def release(self, parameters: Iterable[Parameter]) -> None:
        """The segments of ``parameters`` may make room for others."""
        self._parameters.give_back(parameters)

    def finish_param_sync(self) -> None:
        """Wait for every gather."""
        super().finish_param_sync()
        self._parameters.settle()

    def memory(self) -> Mapping[str, int]:
        """Bytes held by this rank, by role; ``lent`` are those that segments hold whole at a time."""
        held = self._held and max(self._held, self._recomputed)
        lent = most_lent(self._units, held, each_microbatch=self._each_microbatch)
        kept = sum(each.kept for unit in self._units for each in unit.frozen)
        idle = kept + sum(parameter.nbytes for parameter in self._idle)
        return {**super().memory(), "lent": lent, **({"frozen": idle} if idle else {})}

    def _load(self, load: Callable[[Update], None]) -> None:
        self._parameters.forget()
        super()._load(load)

    def _lends(self, parameter: Parameter, info: ParamInfo) -> bool:
        small = parameter.numel() < self._whole_below
        return not small and not info.moved and self._peers[info.replicas].size > 1

    def _lent_shards(self) -> Sequence[Shard]:
        return [shard for unit in self._units for shard in unit.shards]

    def _lay_out_units(self, found: Sequence[tuple[int, int, dict[Parameter, ParamInfo]]]) -> Iterator[Unit]:
        """The units of parameters by chunk and segment, with the memory that this rank keeps of them."""
        # Together, so that owners of whole buckets share the values of all units.
        buckets, idle = (
            self._lay_out([kind(described) for _, _, described in found], lent=True) for kind in (trained, frozen)
        )
        rooms = self._rooms(buckets)
        number = {parameter: index for index, (_, _, described) in enumerate(found) for parameter in described}
        shards: list[list[LentShard]] = [[] for _ in found]
        still: list[list[LentValues]] = [[] for _ in found]
        for bucket in buckets:
            first = bucket.parameters[0]
            shards[number[first]].append(self._lent_shard(bucket, rooms[first.dtype]))
        for bucket in idle:
            still[number[bucket.parameters[0]]].append(LentValues.frozen(bucket, self._owned(bucket)))
        for index, (chunk, place, _) in enumerate(found):
            yield Unit(chunk, place, tuple(shards[index]), tuple(still[index]))

    def _rooms(self, buckets: Sequence[Bucket]) -> dict[torch.dtype, Room]:
        """Memory for this rank's shares, by the type of parameters."""
        kinds = {bucket.parameters[0].dtype: bucket.parameters[0] for bucket in buckets}
        lengths = dict.fromkeys(kinds, 0)
        for bucket in buckets:
            lengths[bucket.parameters[0].dtype] += len(self._updated(bucket))
        masters = not self._options.state_on_host
        return {
            dtype: Room(lengths[dtype], parameter.data, self._main, masters=masters)
            for dtype, parameter in kinds.items()
        }

    def _lent_shard(self, bucket: Bucket, room: Room) -> LentShard:
        return LentShard(bucket, self._updated(bucket), self._owned(bucket), self._main, room, self._place.keep)

    def _gather(self, lent: LentValues) -> Pending:
        return self._sharding[lent.bucket.replicas].start_gather(lent.values, lent.bucket)

    def _reduce(self, shard: LentShard) -> Pending:
        return self._send(shard.bucket)
