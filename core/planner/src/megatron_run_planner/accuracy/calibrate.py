"""From what was measured of a machine's cores to the description of a device: a core each, one thread a rank.

Operators come first: the curves of products, the bandwidth of sweeps, attention. What the layers of real runs take
beyond these is the host's, by least squares; what then is left at a measured shape is its ratio.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product as pairs
from math import exp, log
from statistics import median
from typing import Any

from megatron_run.config.yaml import yaml_text
from megatron_run.contracts.costs import AttentionCosts, FeedForwardCosts, LayerCosts, ModelCosts
from megatron_run.contracts.schedule import LayoutSpec, looped_layout
from megatron_run_planner.accuracy.anchors import least_squares, with_anchors
from megatron_run_planner.devices import (
    Cores,
    Device,
    Host,
    LayerShape,
    Links,
    MeasuredLayer,
    MeasuredMessage,
    MeasuredSum,
    Products,
    Sweeps,
)
from megatron_run_planner.layer_time import embedding_time, head_time, mean_layer
from megatron_run_planner.step_time import place_times
from megatron_run_planner.workload import ModelSplit, gpt2_heads

#: Rows and depths at which a product may reach half of its peak: those that are tried.
_HALVES = tuple(2 ** (power / 2) for power in range(-2, 19))
#: Octaves within which a measured shape speaks for others: those measured lie about one apart.
_REACH = 0.6
#: Bytes of a sum or message up to which it counts as small.
_SMALL = 2**14


@dataclass(frozen=True)
class Survey:
    """A measurement: seconds of each operator, run, sum and message, with its shape before it.

    ``products`` are (rows, columns, depth, seconds) in fp32, ``half_products`` in bf16; ``sweeps`` (bytes, seconds);
    ``attention`` (micro batch, heads, sequence, head size, forward, backward); ``sums`` (members, ranks, bytes,
    seconds); ``messages`` (ranks, bytes, seconds); ``together`` (ranks at once, seconds of the same work). ``runs``
    hold the sizes of a small training, and ``forward`` and ``backward`` of a microbatch and the ``rest`` of a step.
    ``anchors`` are trainings on several ranks: ``request``, ``ranks`` and ``seconds`` of a step.
    """

    cores: int
    memory: float
    products: Sequence[Sequence[float]]
    half_products: Sequence[Sequence[float]]
    sweeps: Sequence[Sequence[float]]
    attention: Sequence[Sequence[float]]
    runs: Sequence[Mapping[str, Any]]
    sums: Sequence[Sequence[float]]
    messages: Sequence[Sequence[float]]
    together: Sequence[Sequence[float]]
    anchors: Sequence[Mapping[str, Any]] = ()


def describe(survey: Survey, name: str) -> Device:
    """The device that ``survey`` measured."""
    peak = max(2 * rows * columns * depth / seconds for rows, columns, depth, seconds in survey.products)
    bandwidth = max(size / seconds for size, seconds in survey.sweeps)
    device = Device(
        name=name,
        memory=survey.memory,
        peak=peak,
        bandwidth=bandwidth,
        width=4,
        fused=True,
        reach=_REACH,
        products=_products(survey, peak),
        # What sweeps and host cost is fitted below; these numbers only stand until then.
        sweeps=Sweeps(efficiency=_typical_bandwidth(survey) / bandwidth, backward=2, loss=4, update=20),
        host=Host(layer=0, softmax=0, head=0, embedding=0, kernel=0, overlaps=False),
        links=_links(survey),
        cores=_cores(survey),
    )
    device = _with_layers(device, survey)
    device = _with_head(device, survey)
    device = _with_update(device, survey)
    device = _with_experts(device, survey)
    return rounded(with_anchors(device, survey.anchors))


def _products(survey: Survey, peak: float) -> Products:
    """The curve of ``survey``, and the share of ``peak`` that its attention reached."""
    flops = sum(4 * b * heads * s**2 * size / forward for b, heads, s, size, forward, _ in survey.attention)
    attention = flops / len(survey.attention) / peak
    return fit_products(survey.products, peak).model_copy(update={"attention": min(1.0, attention)})


def fit_products(measured: Sequence[Sequence[float]], peak: float) -> Products:
    """The curve of shares of ``peak`` that lies nearest to what ``measured`` products reached, in logarithms.

    They are (rows, columns, depth, seconds). Attention stands at the same share until it is measured.
    """
    reached = [
        (rows, min(columns, depth), log(2 * rows * columns * depth / seconds / peak))
        for rows, columns, depth, seconds in measured
    ]
    best = (float("inf"), 0.0, 0.0, 0.0)
    for rows, depth in pairs((0.0, *_HALVES), repeat=2):
        left = [share + log(1 + rows / each) + log(1 + depth / deep) for each, deep, share in reached]
        centre = min(0.0, median(left))
        best = min(best, (sum(abs(each - centre) for each in left), exp(centre), rows, depth))
    return Products(
        efficiency=best[1],
        rows=best[2],
        depth=best[3],
        attention=best[1],
        wide=1e9,  # no product is: none was seen to be slower for its width
        wide_efficiency=best[1],
    )


def _typical_bandwidth(survey: Survey) -> float:
    """Bytes a second of sweeps of the size that activations of small layers have."""
    return median(size / seconds for size, seconds in survey.sweeps if 2**18 <= size <= 2**22)


def _links(survey: Survey) -> Links:
    by_ranks: defaultdict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for members, ranks, size, seconds in survey.sums:
        wire = 2 * (members - 1) / members * size
        by_ranks[int(members), int(ranks)].append((wire, seconds))
    sums = [MeasuredSum(*key, *_line(points)) for key, points in sorted(by_ranks.items())]
    worlds = sorted({int(ranks) for ranks, _, _ in survey.messages})
    lines = {
        world: _line([(size, seconds) for ranks, size, seconds in survey.messages if ranks == world])
        for world in worlds
    }
    latency, bandwidth = lines[worlds[0]]
    return Links(
        machine=max(each.ranks for each in sums),
        latency=latency,
        bandwidth=bandwidth,
        machine_latency=latency,
        machine_bandwidth=bandwidth,
        sums=tuple(sums),
        messages=tuple(MeasuredMessage(world, *line) for world, line in lines.items()),
    )


def _line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Latency, and bytes a second, of (bytes, seconds): the median of the small ones, then what the large ones add."""
    points = list(points)
    latency = median(seconds for size, seconds in points if size <= _SMALL)
    rates = [size / (seconds - latency) for size, seconds in points if size > _SMALL and seconds > latency]
    return latency, median(rates) if rates else 1e12  # large ones took no longer: bytes cost nothing


def _cores(survey: Survey) -> Cores:
    alone = next(seconds for busy, seconds in survey.together if busy == 1)
    slowdown, least = [], 1.0
    for busy, seconds in sorted(survey.together, key=lambda pair: pair[0]):
        least = max(least, seconds / alone)
        slowdown.append((int(busy), least))
    return Cores(count=survey.cores, slowdown=tuple(slowdown), crowded=tuple(slowdown))


def model_of(run: Mapping[str, Any]) -> tuple[ModelCosts, ModelSplit]:
    """The model and split that a run of a survey stands for."""
    hidden, heads = run["hidden"], run["heads"]
    feed = FeedForwardCosts(4 * hidden, experts=run["experts"], top_k=2 if run["experts"] else 0)
    layer = LayerCosts(hidden, run["sequence"], (AttentionCosts.plain(heads, hidden / heads), feed))
    model = ModelCosts((layer,) * run["layers"], run["vocabulary"] * run["tensor"])
    batch = run["micro_batch"] * run["microbatches"]
    return model, ModelSplit(tensor=run["tensor"], micro_batch=run["micro_batch"], global_batch=batch, gradient_bytes=4)


def _layers(survey: Survey) -> list[tuple[ModelCosts, ModelSplit, float, float]]:
    """Model, split and seconds of one layer's forward and backward, for each two runs that differ in depth alone."""
    sizes = ("hidden", "heads", "sequence", "micro_batch", "tensor", "vocabulary", "microbatches", "experts")
    by_shape: defaultdict[tuple[Any, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for run in survey.runs:
        by_shape[tuple(run[key] for key in sizes)].append(run)
    found = []
    for runs in by_shape.values():
        if len(runs) == 2 and not runs[0]["experts"]:
            shallow, deep = sorted(runs, key=lambda run: int(run["layers"]))
            more = deep["layers"] - shallow["layers"]
            forward, backward = ((deep[key] - shallow[key]) / more for key in ("forward", "backward"))
            found.append((*model_of(deep), forward, backward))
    return found


def _alone(device: Device) -> Device:
    """``device`` as one rank has it, to which nobody else says anything: sums cost nothing."""
    links = device.links.model_copy(update={"sums": (MeasuredSum(2, 2, 1e-12, 1e30),)})
    return device.model_copy(update={"links": links, "cores": Cores(count=1)})


def _with_layers(device: Device, survey: Survey) -> Device:
    """Host, sweeps and backward from the layers' times, then their ratios."""
    rows: list[tuple[Sequence[float], float]] = []
    bare = _alone(_changed(device, "sweeps", efficiency=1.0, backward=1e-9))
    once = _alone(_changed(device, "sweeps", efficiency=1.0, backward=1.0))
    for model, split, forward, backward in _layers(survey):
        left, swept = mean_layer(model, split, bare), mean_layer(model, split, once)
        work = swept.backward - left.backward
        rows.append(((work / forward, 0.0, 1 / forward, 0.0), (forward - left.forward + work) / forward))
        rows.append(((0.0, work / backward, 0.0, 1 / backward), (backward - left.backward) / backward))
    ahead, back, first, second = least_squares(rows)
    share = 1 / max(ahead, 1.0)
    device = _changed(device, "sweeps", efficiency=share, backward=max(1e-3, back * share))
    device = _changed(device, "host", layer=first + second, forward=first / ((first + second) or 1.0))
    measured = []
    for model, split, forward, backward in _layers(survey):
        modelled = mean_layer(model, split, _alone(device))
        shape = LayerShape(
            model.hidden, gpt2_heads(model.layers[0], fused=True), model.sequence, split.tensor, split.micro_batch
        )
        ratios = (round(forward / modelled.forward, 3), round(backward / modelled.backward, 3))
        measured.append(MeasuredLayer(*shape, *ratios))
    return device.model_copy(update={"layers": tuple(sorted(measured))})


def _with_head(device: Device, survey: Survey) -> Device:
    """Loss, head and loading: what runs take beyond their layers, forward and backward."""
    rows: list[tuple[Sequence[float], float]] = []
    swept = device.bandwidth * device.sweeps.efficiency
    bare = _alone(_changed(device, "sweeps", loss=1e-9))
    share = device.host.forward
    for run in survey.runs:
        if run["experts"]:
            continue
        model, split = model_of(run)
        layers = mean_layer(model, split, _alone(device)).times(len(model.layers))
        head = head_time(model, split, bare)
        rest = head.then(embedding_time(model, split, bare))
        tokens = split.micro_batch * model.sequence
        logits = 4 * tokens * run["vocabulary"] / swept
        whole, left = run["forward"], run["forward"] - layers.forward - rest.forward
        rows.append(((logits / whole, 0.0, share / whole, 1 / whole, tokens / whole), left / whole))
        whole, left = run["backward"], run["backward"] - layers.backward - rest.backward
        rows.append(((0.0, logits / whole, (1 - share) / whole, 0.0, 0.0), left / whole))
    ahead, back, head_host, batch, token = least_squares(rows)
    device = _changed(device, "sweeps", loss=max(1e-3, ahead + back), loss_forward=ahead / ((ahead + back) or 1.0))
    return _changed(device, "host", head=head_host, batch=batch, token=token)


def _with_update(device: Device, survey: Survey) -> Device:
    """Update of a parameter and what else a step takes."""
    rows: list[tuple[Sequence[float], float]] = []
    swept = device.bandwidth * device.sweeps.efficiency
    for run in survey.runs:
        model, split = model_of(run)
        parameters = (model.kinds.weights + model.kinds.expert_weights) / split.tensor
        parameters += run["vocabulary"] * model.hidden
        rows.append(((parameters / swept / run["rest"], 1 / run["rest"]), 1.0))
    update, step = least_squares(rows)
    return _changed(_changed(device, "sweeps", update=max(1e-3, update)), "host", step=step)


def _with_experts(device: Device, survey: Survey) -> Device:
    """Routing, and calls of each expert: what runs with experts take beyond their products and sweeps."""
    rows: list[tuple[Sequence[float], float]] = []
    for run in survey.runs:
        if run["experts"]:
            model, split = model_of(run)
            layout = looped_layout(LayoutSpec(1, 1, len(model.layers), ()))
            (modelled,) = place_times(model, split, _alone(device), layout)
            whole = run["forward"] + run["backward"]
            more = whole - modelled.forward - modelled.backward
            layers = len(model.layers) / whole
            rows.append(((layers, layers * model.experts), more / whole))
    if not rows:
        return device
    routing, each = least_squares(rows)
    return _changed(device, "host", experts=routing, expert=each)


def rounded(device: Device) -> Device:
    """``device`` with constants of four digits."""
    return Device.model_validate(_rounded(device.model_dump()))


def _rounded(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _rounded(value) for name, value in content.items()}
    if isinstance(content, tuple | list):
        return [_rounded(value) for value in content]
    return float(f"{content:.4g}") if isinstance(content, float) else content


def device_text(device: Device, about: str = "") -> str:
    """``device`` as a YAML file with the comment ``about``: a line for each measured shape."""
    fields = device.model_dump(exclude={"layers"}, exclude_none=True)
    rows = [f"  - [{', '.join(str(each) for each in layer if each is not None)}]\n" for layer in device.layers]
    head = "".join(f"# {line}\n" for line in about.splitlines())
    shapes = "# hidden, heads, sequence, tensor, micro batch, ratio of the forward, of the backward\nlayers:\n"
    return "".join([head, yaml_text(fields), *([shapes, *rows] if rows else [])])


def _changed(device: Device, section: str, **values: float) -> Device:
    return device.model_copy(update={section: getattr(device, section).model_copy(update=values)})
