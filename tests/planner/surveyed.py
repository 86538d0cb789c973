"""What a survey would measure on a device that is known exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_run.config.request import Request
from megatron_run.contracts.schedule import LayoutSpec, looped_layout
from megatron_run.pipeline.plan import Plan
from megatron_run_planner.accuracy.calibrate import Survey, model_of
from megatron_run_planner.devices import Cores, Device, Host, Links, MeasuredSum, Products, Sweeps
from megatron_run_planner.schedules import Schedules
from megatron_run_planner.step_time import after_backward, place_times, step_time
from megatron_run_planner.task import Task, read_task

#: A machine of two cores whose law the description can have.
TRUE = Device(
    name="true",
    memory=2**34,
    peak=100e9,
    bandwidth=20e9,
    width=4,
    fused=True,
    products=Products(efficiency=0.9, rows=16, depth=8, attention=0.4, wide=1e9, wide_efficiency=0.9),
    sweeps=Sweeps(efficiency=0.5, backward=1.5, loss=6, loss_forward=0.4, update=30),
    host=Host(
        layer=1e-3,
        softmax=0,
        head=5e-4,
        embedding=0,
        kernel=0,
        overlaps=False,
        forward=0.6,
        experts=2e-3,
        expert=3e-4,
        batch=3e-4,
        token=1e-6,
        step=1e-3,
    ),
    links=Links(
        machine=2,
        bandwidth=1e9,
        latency=1e-4,
        machine_latency=1e-4,
        machine_bandwidth=1e9,
        sums=(MeasuredSum(2, 2, 2e-4, 1e9),),
    ),
    cores=Cores(count=2, slowdown=((1, 1.0), (2, 1.1), (4, 2.4))),
)
#: hidden, heads, sequence, micro batch
SHAPES = ((64, 4, 64, 1), (128, 4, 128, 2), (256, 4, 128, 2), (256, 8, 256, 1), (512, 8, 64, 4))
_NAMES = ("hidden", "heads", "sequence", "micro_batch", "layers", "vocabulary", "microbatches", "experts")
_PRODUCTS = ((64, 512, 128), (128, 384, 512), (256, 1024, 256), (1024, 1024, 1024), (32, 64, 2048), (2048, 256, 32))


def surveyed(device: Device, anchors: Sequence[Mapping[str, Any]] = ()) -> Survey:
    """The survey of ``device``."""
    products, alone = device.products, device.model_copy(update={"cores": Cores(count=1)})
    alone = alone.model_copy(
        update={"links": device.links.model_copy(update={"sums": (MeasuredSum(2, 2, 1e-9, 1e30),)})}
    )

    def product(rows: int, columns: int, depth: int) -> float:
        share = products.efficiency / (1 + products.rows / rows) / (1 + products.depth / min(columns, depth))
        return 2 * rows * columns * depth / (device.peak * share)

    sizes = [(*shape, layers, 1024, 2, 0) for shape in SHAPES for layers in (1, 3)]
    sizes += [(*SHAPES[1], 1, 8192, 2, 0)]
    sizes += [(*SHAPES[1], layers, 1024, 2, experts) for experts in (4, 8) for layers in (1, 3)]
    runs = []
    for each in sizes:
        run: dict[str, Any] = {**dict(zip(_NAMES, each, strict=True)), "tensor": 1}
        model, split = model_of(run)
        layout = looped_layout(LayoutSpec(1, 1, len(model.layers), ()))
        (times,) = place_times(model, split, alone, layout)
        rest = after_backward(model, split, alone, layout)[0]
        runs.append({**run, "forward": times.forward, "backward": times.backward, "rest": rest})
    swept = device.bandwidth * device.sweeps.efficiency
    (sums,) = device.links.sums
    assert device.cores is not None, "ranks share cores there"
    sent = (2**6, 2**17, 2**23)
    attention = device.peak * products.attention
    return Survey(
        cores=device.cores.count,
        memory=device.memory,
        products=[(*shape, product(*shape)) for shape in _PRODUCTS],
        half_products=[],
        sweeps=[(size, size / swept) for size in (2**18, 2**20, 2**24)],
        attention=[(2, 4, 128, 64, 4 * 8 * 128**2 * 64 / attention, 0.0)],
        runs=runs,
        sums=[(2, 2, size, sums.latency + size / sums.bandwidth) for size in sent],
        messages=[(2, size, device.links.latency + size / device.links.bandwidth) for size in sent],
        together=[(busy, 0.01 * factor) for busy, factor in device.cores.slowdown],
        anchors=anchors,
    )


def anchored(device: Device) -> tuple[Task, list[dict[str, Any]]]:
    """A training on two tensor ranks, and the anchor that it makes on ``device``."""
    sets = ("parallel.tensor=2", "model.num_layers=4", "model.hidden_size=128", "model.num_heads=4")
    request = Request(("preset:tiny",), sets, ("parallel-layer=tensor",))
    task = read_task(request, 2)
    seconds = step_time(task.model, task.split, device, plan_of(task)).seconds
    return task, [{"request": request.to_json(), "ranks": 2, "seconds": seconds}]


def plan_of(task: Task) -> Plan:
    """The plan of one step."""
    split = task.split
    return Schedules().plan(task.schedule, len(task.model.layers), split.pipeline, split.chunks, split.microbatches)
