"""The key-value store at which the ranks of a world meet."""

from __future__ import annotations

from datetime import timedelta

# torch.distributed has these names too, but does not declare them as its own.
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

from megatron_run.errors import RankLostError
from megatron_run_engine.runtime.world import World


def open_store(world: World, timeout: float) -> Store:
    """The store of ``world``; ``timeout`` seconds to reach it. Raises :class:`RankLostError` when nobody listens.

    A world that torchrun starts again finds the store of its agent, with what the failed ranks left in it: each start
    has keys of its own, as in torch's own ``env://``.
    """
    return PrefixStore(f"attempt-{world.restart}", _reach(world, timeout))


def _reach(world: World, timeout: float) -> Store:
    if world.size == 1:
        return HashStore()
    if world.init_method.startswith("file://"):
        return FileStore(world.init_method.removeprefix("file://"), world.size)
    host, _, port = world.init_method.removeprefix("tcp://").rpartition(":")
    try:
        return TCPStore(
            host,
            int(port),
            is_master=world.serves_store,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        verb = "open" if world.serves_store else "reach"
        raise RankLostError(
            f"rank {world.rank} cannot {verb} the meeting point {world.init_method}",
            why=str(error).splitlines()[0],
            fix="check that the first host is up and the port is free and open",
        ) from error
