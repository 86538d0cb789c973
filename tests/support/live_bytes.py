"""How many bytes of tensors are alive at once, whatever the allocator keeps and the system maps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_run_engine.runtime import tensors_in

#: Operators that give a tensor whose memory is a mapped file.
_MAPPED = frozenset({"aten::from_file"})


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors that this thread made within the block and that were alive together: ``peak``.

    Views add nothing, and neither do mapped files.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.peak: int = 0
        self._live: dict[StorageWeakRef, int] = {}
        self._mapped: set[StorageWeakRef] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {StorageWeakRef(each.untyped_storage()) for each in tensors_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            place = StorageWeakRef(storage)
            if func._schema.name in _MAPPED:
                self._mapped.add(place)
            elif place not in given and place not in self._mapped and tensor.device.type == "cpu":
                self._live[place] = storage.nbytes()
        self._live = {place: size for place, size in self._live.items() if not place.expired()}
        self.peak = max(self.peak, sum(self._live.values()))
        return result


def peak_of(work: Callable[[], object]) -> int:
    """The peak of :class:`LiveBytes` while ``work`` runs."""
    live = LiveBytes()
    with live:
        work()
    return live.peak
