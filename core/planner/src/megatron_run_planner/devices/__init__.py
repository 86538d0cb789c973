"""The abilities of a device and of the network around it, read from YAML; the package ships some by name."""

from __future__ import annotations

from functools import cache
from math import exp, log, log2
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from megatron_run.config.yaml import bare, parse
from megatron_run.contracts.schema import Section
from megatron_run.errors import InputError
from megatron_run.errors.wording import did_you_mean
from megatron_run.files.foreign_file import read_file

_SHIPPED = Path(__file__).parent


class Products(Section):
    """The share of the peak that a matrix product reaches: ``efficiency`` / ((1 + rows/m) (1 + depth/min(n, k))).

    A product with at least ``wide`` columns reaches ``wide_efficiency`` instead.
    """

    efficiency: float = Field(gt=0, le=1, description="share of the peak that a large product reaches")
    rows: float = Field(ge=0, description="rows at which half of it is reached")
    depth: float = Field(ge=0, description="columns or depth at which half of it is reached")
    attention: float = Field(gt=0, le=1, description="share of the peak that scores and context reach")
    wide: float = Field(ge=1, description="columns from which on a product is slow")
    wide_efficiency: float = Field(gt=0, le=1, description="share of the peak that those reach")


class Sweeps(Section):
    """The share of the memory bandwidth that elementwise kernels reach, and how many there are.

    Where they are ``counted`` they are this project's own (:mod:`megatron_run_planner.layer_time.passes`), of
    ``kernels`` in Triton where it has some; else those of the program whose steps were fitted.
    """

    counted: bool = Field(False, description="passes are counted in the code, and what follows efficiency is not used")
    kernels: bool = Field(True, description="of those that are counted, whether Triton's kernels make them")

    efficiency: float = Field(gt=0, le=1, description="share of the memory bandwidth")
    backward: float = Field(gt=0, description="bytes of a layer's backward, in units of its forward's")
    loss: float = Field(gt=0, description="passes over fp32 logits by head and loss, forward and backward")
    loss_forward: float = Field(0.5, ge=0, le=1, description="share of these that the forward makes")
    update: float = Field(gt=0, description="bytes that the optimizer moves for a parameter")


class Host(Section):
    """Seconds that the host needs to launch kernels. A device that computes faster than that waits.

    Where nothing ``overlaps``, as on a processor, the thread that launches computes too: the two add.
    """

    layer: float = Field(ge=0, description="forward and backward of one layer")
    softmax: float = Field(ge=0, description="the extra kernels of a softmax that is not fused")
    head: float = Field(ge=0, description="norm, head and loss, forward and backward")
    embedding: float = Field(ge=0, description="embedding, forward and backward")
    kernel: float = Field(ge=0, description="shortest time of one kernel on the device")
    power: float = Field(2.0, ge=1, description="of the sum that joins computing and launching where they overlap")
    overlaps: bool = Field(True, description="the device computes while the host launches")
    forward: float = Field(1 / 3, ge=0, le=1, description="share of these that forwards take")
    experts: float = Field(0.0, ge=0, description="routing of one layer of experts, forward and backward")
    expert: float = Field(0.0, ge=0, description="calls of one expert, forward and backward")
    batch: float = Field(0.0, ge=0, description="loading a microbatch")
    token: float = Field(0.0, ge=0, description="loading one of its tokens")
    step: float = Field(0.0, ge=0, description="one step, whatever the model")
    copies: float = Field(2.5e10, gt=0, description="bytes a second from device to host, or back; a PCIe 4.0 link's")
    updates: float = Field(
        2.5e10, gt=0, description="bytes a second that the host reads and writes in its memory for one device's update"
    )


class MeasuredSum(NamedTuple):
    """Sums over each ``members`` of ``ranks`` ranks of a machine: seconds of a small one, bytes a second of a large."""

    members: PositiveInt
    ranks: PositiveInt
    latency: PositiveFloat
    bandwidth: PositiveFloat


class MeasuredMessage(NamedTuple):
    """A message between neighbours among ``ranks`` ranks of a machine."""

    ranks: PositiveInt
    latency: PositiveFloat
    bandwidth: PositiveFloat


class Links(Section):
    """Links inside a machine and between machines, as ring all-reduces see them.

    Where ranks share cores, ``sums`` and ``messages`` are what was measured with as many ranks there.
    """

    machine: int = Field(ge=1, description="devices of one machine")
    bandwidth: float = Field(gt=0, description="bytes a second of a ring inside a machine")
    latency: float = Field(ge=0, description="seconds of a collective of two ranks inside; grows with log2 of ranks")
    machine_bandwidth: float = Field(gt=0, description="bytes a second of one device's share of the network")
    machine_latency: float = Field(ge=0, description="the same latency between machines")
    exchange: float = Field(1.0, gt=0, description="time of an all-to-all over that of a sum of half its bytes")
    sums: tuple[MeasuredSum, ...] = ()
    messages: tuple[MeasuredMessage, ...] = ()


class Cores(Section):
    """Cores that the ranks of a machine share, each rank one thread.

    ``slowdown`` holds (ranks that compute at once, their time over that of one alone), by growing ranks; ``crowded``
    the same where there are more ranks than cores: those that wait leave two that compute on one core for a while.
    """

    count: int = Field(ge=1, description="cores of the machine")
    slowdown: tuple[tuple[PositiveInt, PositiveFloat], ...] = ((1, 1.0),)
    crowded: tuple[tuple[PositiveInt, PositiveFloat], ...] = ()

    def slower(self, busy: int, ranks: int = 1) -> float:
        """How much slower a rank computes while ``busy`` of ``ranks`` do: measured, or in proportion between them."""
        table = self.crowded if self.crowded and ranks > self.count else self.slowdown
        below, above = table[0], table[-1]
        for number, factor in table:
            if number == busy:
                return factor
            if number < busy:
                below = number, factor
            else:
                above = number, factor
                break
        if below[0] >= above[0]:
            return below[1] * max(1.0, busy / max(below[0], self.count))
        share = (busy - below[0]) / (above[0] - below[0])
        return below[1] + share * (above[1] - below[1])


class LayerShape(NamedTuple):
    """The causes of the efficiency of a plain layer (no gate, no key-value groups, stored scores)."""

    hidden: PositiveInt
    heads: PositiveInt
    sequence: PositiveInt
    tensor: PositiveInt
    micro_batch: PositiveInt


class MeasuredLayer(NamedTuple):
    """A plain layer's measured time at one shape, as the ``ratio`` to what the constants give.

    With ``backward`` the ratio is the forward's alone.
    """

    hidden: PositiveInt
    heads: PositiveInt
    sequence: PositiveInt
    tensor: PositiveInt
    micro_batch: PositiveInt
    ratio: PositiveFloat
    backward: PositiveFloat | None = None


class Device(Section):
    """One kind of device in its machine. Bytes, seconds, FLOP/s.

    Peak and measured layers are those of values of ``width`` bytes, and of attention that stores scores or, with
    ``fused``, does not. A measured shape speaks for shapes within ``reach`` octaves.
    """

    name: str = Field(description="name in reports")
    memory: float = Field(gt=0, description="bytes of memory")
    peak: float = Field(gt=0, description="dense FLOP/s of values of that width")
    bandwidth: float = Field(gt=0, description="bytes a second of memory")
    width: Literal[2, 4] = Field(2, description="bytes of an activation or a weight")
    fused: bool = Field(False, description="whether the measured layers have fused attention")
    reach: float = Field(0.35, gt=0, description="octaves within which a measured shape speaks for others")
    cores: Cores | None = None
    products: Products
    sweeps: Sweeps
    host: Host
    links: Links
    layers: tuple[MeasuredLayer, ...] = ()

    def measured_ratio(self, shape: LayerShape) -> tuple[float, float]:
        """Measured over modelled time of layers like ``shape``, forward and backward: 1 far from every measured one.

        The logarithms of the measured ratios are averaged, with weights that fall with the distance in octaves
        (a Gaussian kernel); the model's own ratio, 1, takes part with a small weight.
        """
        forward, backward, weight = 0.0, 0.0, 0.02
        for one in self.layers:
            away = sum(log2(a / b) ** 2 for a, b in zip(shape, one[:5], strict=True))
            share = exp(-away / (2 * self.reach**2))
            forward += share * log(one.ratio)
            backward += share * log(one.backward or one.ratio)
            weight += share
        return exp(forward / weight), exp(backward / weight)


@cache
def shipped_devices() -> tuple[str, ...]:
    """Names of the devices that come with the package."""
    return tuple(sorted(file.stem for file in _SHIPPED.glob("*.yaml")))


def device_file(name: str) -> Path:
    """The file of the device ``name``: one that is shipped, or the YAML file of that name."""
    return Path(name) if name.endswith((".yaml", ".yml")) else _SHIPPED / f"{name}.yaml"


def read_device(name: str) -> Device:
    """The device named ``name``, or described by the YAML file ``name``. ``like: NAME`` takes what it leaves out.

    What is measured is not taken: ratios of one device say nothing of another.
    Raises :class:`InputError` for an unknown name, a file that cannot be read, or a wrong description.
    """
    file = device_file(name)
    if not file.is_file():
        known = shipped_devices()
        raise InputError(
            f"there is no device {name!r}",
            fix=did_you_mean(name, known) or f"the devices are {', '.join(known)}, or a YAML file",
        )
    try:
        nodes = parse(read_file(file).decode("utf-8-sig"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read", why=str(error)) from None
    fields = {key: bare(node) for key, node in nodes.items()}
    if base := fields.pop("like", None):
        if base not in shipped_devices():  # of files one may be like itself
            raise InputError(f"{file}: like: {base}: no shipped device", fix=f"one of {', '.join(shipped_devices())}")
        fields = _over(read_device(str(base)).model_dump(exclude={"layers"}), fields)
    try:
        return Device.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{file}: {where}: {first['msg'].lower()}", fix="compare with a shipped device") from None


def _over(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``changes`` over ``base``, key by key in sections too."""
    merged = {
        key: _over(value, changes[key]) if isinstance(value, dict) and isinstance(changes.get(key), dict) else value
        for key, value in base.items()
    }
    return merged | {key: value for key, value in changes.items() if not isinstance(merged.get(key), dict)}
