"""Offload: saved activations wait in host memory for their backward (Rhu et al. 2016, "vDNN", by segments of a layer).

When a segment's forward has ended, one copy to the host is started on a side stream. Device memory is given back when
the next offloaded segment ends, which leaves the copy that segment's time. The backward begins to bring back a segment
when it needs its first tensor, and with it already the segment before: that copy has one segment's backward to finish.

No step waits for a copy on the host: streams wait for events. Storages are moved whole and once, however many views of
them are saved. Parameters and their gradients, inputs of the chunk (the executor holds them), and small tensors stay.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_run_engine.runtime.copies import make_copies

if TYPE_CHECKING:
    from torch.nn import Parameter

    from megatron_run.contracts import Microbatch
    from megatron_run.contracts.schema import TrainSection
    from megatron_run_engine.runtime.copies import Copies
    from megatron_run_engine.runtime.metrics import Metrics

#: Bytes below which a tensor stays: by device type, since a copy costs a launch on each side. On a CPU there is nothing
#: to gain, and a small model shows what would be moved.
SMALLEST = {"cuda": 2**18, "cpu": 2**10}


#: Metrics as observers see them: MiB of a rank that a step moves to the host and back, and holds there at most.
METRICS = ("offload/out_mib", "offload/back_mib", "offload/peak_mib")


@dataclass
class Traffic:
    """Bytes moved ``out`` and ``back``, and the ``peak`` of those ``held`` in host memory, since the last ``take``."""

    out: int = 0
    back: int = 0
    held: int = 0
    peak: int = 0

    def take(self) -> tuple[float, float, float]:
        """The counts for :data:`METRICS`. Counts start again; what is held stays held."""
        taken = self.out / 2**20, self.back / 2**20, self.peak / 2**20
        self.out = self.back = 0
        self.peak = self.held
        return taken

    def hold(self, size: int) -> None:
        """Count ``size`` bytes of host memory."""
        self.held += size
        self.peak = max(self.peak, self.held)

    def release(self, size: int) -> None:
        """Count ``size`` bytes of host memory as freed."""
        self.held -= size


@dataclass(eq=False)
class _Storage:
    """A storage that was saved: ``here`` on the device, ``away`` in host memory, or both. Flat, uint8."""

    here: Tensor | None
    size: int
    key: int
    away: Tensor | None = None

    def view(self, like: _View) -> Tensor:
        assert self.here is not None
        with torch.no_grad():
            found = torch.empty(0, dtype=like.dtype, device=self.here.device)
            return found.set_(self.here.untyped_storage(), like.offset, like.size, like.stride)


@dataclass(eq=False)
class _Group:
    """The saved tensors of one segment. ``before`` is the offloaded segment before it in the same forward.

    Storages live as long as the autograd graph holds views of them. ``out`` is the event of their copy to the host.
    """

    before: _Group | None
    storages: list[weakref.ref[_Storage]] = field(default_factory=list)
    out: Any = None

    def alive(self) -> list[_Storage]:
        return [storage for each in self.storages if (storage := each()) is not None]


@dataclass(eq=False)
class _View:
    """The object that autograd keeps in the place of a saved tensor."""

    storage: _Storage
    group: _Group
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Offload:
    """Moves what segments save: storages on ``device`` of at least ``smallest`` bytes; ``out`` and ``back`` copy."""

    def __init__(self, device: torch.device, out: Copies, back: Copies, smallest: int) -> None:
        self.traffic = Traffic()
        self._device, self._out, self._back, self._smallest = device, out, back, smallest
        self._stay: set[int] = set()
        #: Storages on the device that were saved, by the address of torch's object.
        self._known: weakref.WeakValueDictionary[int, _Storage] = weakref.WeakValueDictionary()
        self._place = (0, 0, 0)  # step, microbatch and layer of the forward that runs
        self._before: _Group | None = None
        self._latest: _Group | None = None  # its storages are still on the device
        self._reading: _Group | None = None  # the segment whose backward runs
        # Under way to the device. Held although nobody may ask for them: freed earlier, their memory would be given out
        # while the copy still writes to it.
        self._coming: tuple[Any, list[Tensor]] | None = None

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Never move ``tensors``, which live as long as the model: buffers such as the table of rotary angles."""
        self._stay.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def enter(self, microbatch: Microbatch, layer: int) -> None:
        """A layer's forward begins. Unless it follows that of the layer before, its backward does not precede it."""
        step, index, last = self._place
        self._place = (microbatch.step, microbatch.index, layer)
        if (step, index) != self._place[:2] or layer not in (last, last + 1):
            self._before = None

    @contextmanager
    def saving(self, parameters: Iterable[Parameter]) -> Iterator[None]:
        """Within, segments run that read ``parameters``. Afterwards what they have saved moves to the host."""
        group = _Group(self._before)
        stay = self._stay | {parameter.untyped_storage()._cdata for parameter in parameters}
        with saved_tensors_hooks(lambda tensor: self._pack(tensor, group, stay), self._unpack):
            yield
        self._send(group)
        if self._latest is not None:
            self._give_back(self._latest)
        self._before = self._latest = group

    def _pack(self, tensor: Tensor, group: _Group, stay: set[int]) -> Tensor | _View:
        if type(tensor) is not Tensor or tensor.device != self._device or tensor.layout is not torch.strided:
            return tensor
        source = tensor.untyped_storage()
        # A leaf with a gradient is a parameter, or the chunk's input, which the executor holds until the backward.
        if (tensor.requires_grad and tensor.is_leaf) or source._cdata in stay or source.nbytes() < self._smallest:
            return tensor
        storage = self._known.get(source._cdata)
        if storage is None:
            with torch.no_grad():
                here = torch.empty(0, dtype=torch.uint8, device=self._device).set_(source)
            storage = self._known[source._cdata] = _Storage(here, source.nbytes(), source._cdata)
        if all(each() is not storage for each in group.storages):
            group.storages.append(weakref.ref(storage))
        return _View(storage, group, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _send(self, group: _Group) -> None:
        """Start to copy what ``group`` saved first."""
        pairs = []
        for storage in group.alive():
            if storage.away is None:
                assert storage.here is not None  # it is given back after it was sent
                storage.away = self._out.buffer(storage.size)
                self.traffic.hold(storage.size)
                weakref.finalize(storage, self.traffic.release, storage.size).atexit = False
                pairs.append((storage.away, storage.here))
        if pairs:
            self.traffic.out += sum(target.nbytes for target, _ in pairs)
            group.out = self._out.start(pairs)

    def _give_back(self, group: _Group) -> None:
        """Free the device memory of ``group``: whoever gets it works after the copy."""
        if group.out is not None:
            self._out.wait(group.out)
        for storage in group.alive():
            if self._known.get(storage.key) is storage:
                del self._known[storage.key]  # the address may now come to mean another storage
            storage.here = None

    def _unpack(self, saved: Tensor | _View) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved.group is not self._reading:
            self._reading = saved.group
            self._bring(saved.group)
            self._settle()
            if saved.group.before is not None:
                self._bring(saved.group.before)
        return saved.storage.view(saved)

    def _bring(self, group: _Group) -> None:
        """Start to copy back what of ``group`` is not on the device."""
        missing = [storage for storage in group.alive() if storage.here is None]
        if not missing:
            return
        self._settle()
        pairs = []
        for storage in missing:
            assert storage.away is not None  # it was sent before it was given back
            storage.here = self._back.buffer(storage.size)
            pairs.append((storage.here, storage.away))
        self.traffic.back += sum(storage.size for storage in missing)
        self._coming = (self._back.start(pairs), [target for target, _ in pairs])

    def _settle(self) -> None:
        """Let what follows wait for the copies under way."""
        if self._coming is not None:
            self._back.wait(self._coming[0])
            self._coming = None


def make_offload(train: TrainSection, device: torch.device, metrics: Metrics) -> Offload | None:
    """The offload that ``train.offload`` asks for on ``device``, and its metrics in MiB a rank; None without any."""
    if train.offload == "none":
        return None
    out, back = make_copies(device, to_host=True), make_copies(device, to_host=False)
    offload = Offload(device, out, back, SMALLEST["cuda" if device.type == "cuda" else "cpu"])
    metrics.read(METRICS, offload.traffic.take)
    return offload
