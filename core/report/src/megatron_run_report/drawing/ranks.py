"""Which rank is where: a row per pipeline stage, a group per replica of the data, a box per context and tensor rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from megatron_run.errors.wording import printable

#: The most stages, replicas, and ranks of a replica's stage that are drawn.
STAGES, REPLICAS, COPY = 16, 8, 8
#: Pixels: a box, the gap between groups, a row, the names of stages, a letter of their layers.
BOX, GAP, ROW, NAME, LETTER = 38, 12, 40, 62, 7.0
#: The most characters of what a stage holds.
_LONGEST = 48


def ranks_drawn(topology: Mapping[str, Any]) -> Markup | None:
    """The picture of ``topology`` of a ``plan.json``; None where it tells too little."""
    listed = topology.get("ranks")
    ranks = [each for each in listed if _is_place(each)] if isinstance(listed, list) else []
    if not ranks:
        return None
    tensor = 1 + max(each["tensor"] for each in ranks)
    places = [(each, each.get("context", 0) * tensor + each["tensor"]) for each in ranks]
    drawn = [
        (each, place) for each, place in places if each["stage"] < STAGES and each["data"] < REPLICAS and place < COPY
    ]
    if not drawn:
        return None
    shown = [each for each, _ in drawn]
    stages, replicas = (1 + max(each[axis] for each in shown) for axis in ("stage", "data"))
    group = (1 + max(place for _, place in drawn)) * BOX + GAP
    layers = {each["stage"]: _held(each) for each in reversed(shown)}
    width = NAME + replicas * group + max(map(len, layers.values())) * LETTER + GAP
    top = 20 if replicas > 1 else 4
    parts = [
        Markup('<svg class="drawn ranks" width="{0:.0f}" height="{1}" viewBox="0 0 {0:.0f} {1}" role="img" ').format(
            width, top + stages * ROW
        ),
        Markup('aria-label="ranks by stage, data, context and tensor">'),
        *(_replica(number, group) for number in range(replicas if replicas > 1 else 0)),
        *(_stage(stage, top, replicas * group, layers.get(stage, "")) for stage in range(stages)),
        *(part for each, place in drawn for part in _box(each, place, top, group)),
        Markup("</svg>"),
    ]
    return Markup("").join(parts)


def ranks_text(topology: Mapping[str, Any]) -> str:
    """``world 8 = tensor 2 x pipeline 2 x data 2``; empty where it is not known."""
    axes = ("tensor", "context", "pipeline", "data")
    sizes = {axis: topology[axis] for axis in axes if type(topology.get(axis)) is int}
    if type(topology.get("world")) is not int or len(sizes.keys() - {"context"}) < 3:
        return ""
    if sizes.get("context") == 1:
        del sizes["context"]
    chunks, expert = topology.get("chunks"), topology.get("expert")
    more = f"; {chunks} chunks per stage" if type(chunks) is int and chunks > 1 else ""
    more += f"; experts split {expert} ways" if type(expert) is int and expert > 1 else ""
    limits = {"tensor": COPY, "context": COPY, "pipeline": STAGES, "data": REPLICAS}
    cut = [f"{limit} {axis}" for axis, limit in limits.items() if sizes.get(axis, 1) > limit]
    more += f"; drawn are the first {', '.join(cut)}" if cut else ""
    return f"world {topology['world']} = " + " x ".join(f"{axis} {size}" for axis, size in sizes.items()) + more


def _is_place(each: object) -> bool:
    numbers = ("rank", "stage", "tensor", "data")
    return isinstance(each, dict) and all(
        type(number) is int and number >= 0 for number in (*map(each.get, numbers), each.get("context", 0))
    )


def _held(each: Mapping[str, Any]) -> str:
    text = each.get("layers_text")
    return printable(f"layers {text}"[:_LONGEST]) if isinstance(text, str) else ""


def _replica(number: int, group: int) -> Markup:
    return Markup('<text class="tick" x="{}" y="13">data {}</text>').format(NAME + number * group, number)


def _stage(stage: int, top: int, right: int, layers: str) -> Markup:
    y = top + stage * ROW + 21
    return Markup(
        '<text class="name" x="0" y="{0}">stage {1}</text><text class="tick" x="{2}" y="{0}">{3}</text>'
    ).format(y, stage, NAME + right, layers)


def _box(each: Mapping[str, Any], place: int, top: int, group: int) -> Iterator[Markup]:
    x, y = NAME + each["data"] * group + place * BOX, top + each["stage"] * ROW
    axes = [f"{axis} {each[axis]}" for axis in ("stage", "tensor", "context", "data") if axis in each]
    about = f"rank {each['rank']}: {', '.join(axes)}; {_held(each)}"
    yield Markup('<g><title>{}</title><rect class="rank" x="{}" y="{}" width="{}" height="28" rx="4"/>').format(
        about, x, y + 2, BOX - 4
    )
    yield Markup('<text class="number" text-anchor="middle" x="{}" y="{}">{}</text></g>').format(
        x + BOX / 2 - 2, y + 21, each["rank"]
    )


def legend(letters: Sequence[str], names: Sequence[str]) -> list[tuple[Markup, str]]:
    """For each run a piece of its line, and its letter and name."""
    return [
        (
            Markup(
                '<svg class="drawn piece" viewBox="0 0 34 12" width="34" height="12" aria-hidden="true">'
                '<g class="run{}"><path class="line" d="M0 6H34"/></g></svg>'
            ).format(index),
            f"{letter}: {name}",
        )
        for index, (letter, name) in enumerate(zip(letters, names, strict=True))
    ]
