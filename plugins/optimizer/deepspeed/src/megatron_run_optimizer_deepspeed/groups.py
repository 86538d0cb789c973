"""The process group of the data-parallel ranks, which DeepSpeed needs even for one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from megatron_run_engine.runtime.context import BuildContext


def data_group(context: BuildContext) -> Any:
    """The data-parallel process group of this rank. Collective with one data-parallel rank: creates the groups.

    A world of one rank has no default process group; the one made here stays for the life of the process, as
    DeepSpeed's own settings do.
    """
    group = context.groups.group("data")
    if group is not None:
        return group
    if not dist.is_initialized():
        backend = "nccl" if context.device.type == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]  # exported, but missing in the stubs
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    # new_group is collective: every rank makes the groups of all ranks, in the same order.
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return alone[dist.get_rank()]
