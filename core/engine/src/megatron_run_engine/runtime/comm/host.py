"""Tensors of a GPU on their way through gloo, which reads and writes host memory.

gloo is asked for with ``run.backend=gloo``, so that ranks may share a GPU. Of its operations some copy a GPU's tensors
themselves, some refuse them, and ``send`` would take the address for one of the host. So all are copied here, on the
stream of the caller, who waits for the copy to the host: made for tests and for debugging, not for speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from megatron_run.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class Waitable(Protocol):
    """What a collective that was started can be asked: ``dist.Work``, or a stand-in for it."""

    def wait(self) -> object:
        """Block until it is complete."""
        ...


class OnHost:
    """A collective that fills ``copy`` on the host; once it is complete, ``result`` gets the values."""

    def __init__(self, work: Waitable | None, copy: Tensor, result: Tensor) -> None:
        self._work, self._copy, self._result = work, copy, result

    def wait(self) -> None:
        """Block until the collective is complete, then copy."""
        if self._work is not None:
            self._work.wait()
        self._result.copy_(self._copy)


def passes_host(device: torch.device, group: dist.ProcessGroup | None) -> bool:
    """Whether ``group`` carries tensors of ``device`` as copies on the host."""
    return device.type == "cuda" and dist.get_backend(group) == "gloo"


def start(
    begin: Callable[..., Waitable | None], group: dist.ProcessGroup | None, result: Tensor, *inputs: Tensor
) -> Waitable | None:
    """Call ``begin(result, *inputs)``, which starts a collective of ``group``; on host copies where gloo needs them.

    ``result`` is also read. Raises :class:`PluginError` while a CUDA graph is recorded: the copy to the host would not
    be part of it.
    """
    if not passes_host(result.device, group):
        return begin(result, *inputs)
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise PluginError(
            "a CUDA graph cannot hold gloo's collectives",
            why="they compute on the host",
            fix="set run.backend=nccl, or choose --plugin graph-capture=none",
        )
    copy, *copies = (tensor.to("cpu", copy=True) for tensor in (result, *inputs))
    return OnHost(begin(copy, *copies), copy, result)
