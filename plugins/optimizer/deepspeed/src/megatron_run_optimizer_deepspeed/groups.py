"""The data-parallel ranks as a process group, which DeepSpeed needs even of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from megatron_run_engine.runtime.context import BuildContext


def data_group(context: BuildContext) -> Any:
    """The data-parallel process group of this rank. Collective where every rank is alone: the groups are made here.

    A world of one rank has no process group at all; the one that it gets stays for the life of the process, as
    DeepSpeed's own settings do.
    """
    group = context.groups.group("data")
    if group is not None:
        return group
    if not dist.is_initialized():
        backend = "nccl" if context.device.type == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]  # it is exported, but not to the type checker
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return alone[dist.get_rank()]
