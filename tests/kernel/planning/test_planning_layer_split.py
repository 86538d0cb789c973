"""Uneven splits: over a grid of shapes every accepted wish is a whole split, and every refusal's numbers work."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megatron_run.contracts.schedule import LayoutSpec, Place, looped_layout
from megatron_run.contracts.schema import ParallelSection
from megatron_run.errors import ExitCode, InputError
from megatron_run.planning.layer_split import layer_counts, natural_layers
from tests.support.plugin_file import schedule_file
from tests.support.random_schedules import Layout, vee_layout
from tests.support.resolving import mistake, resolved

SHAPES = list(product(range(1, 5), range(1, 4)))
LAYOUTS = (looped_layout, vee_layout)
FIRST, LAST = "first_stage_layers", "last_stage_layers"
EMBEDDING, LOSS = "embedding_as_layer", "loss_as_layer"


def split(layers: int, parallel: ParallelSection, layout: Layout) -> tuple[Place, ...]:
    """Ask once for the places and once for the layers, as a run does."""
    shape = parallel.pipeline, parallel.chunks
    stages = [place.stage for place in layout(LayoutSpec(*shape, shape[0] * shape[1]))]
    return layout(LayoutSpec(*shape, layers, layer_counts(layers, parallel, stages)))


def by_stage(places: tuple[Place, ...]) -> list[list[int]]:
    """The layers of each stage's chunks."""
    found: dict[int, list[int]] = {}
    for place in places:
        found.setdefault(place.stage, []).append(len(place.layers))
    return [found[stage] for stage in sorted(found)]


def fixed_ends() -> Iterator[tuple[int, ParallelSection]]:
    counts = (None, 0, 1, 2, 4, 13)
    for (stages, chunks), layers, first, last in product(SHAPES, range(1, 11), counts, counts):
        if stages > 1 and (first is not None or last is not None):
            wish = {FIRST: first, LAST: last}
            yield layers, ParallelSection(pipeline=stages, chunks=chunks, **wish)


def counted_ends() -> Iterator[tuple[int, ParallelSection]]:
    for (stages, chunks), layers, wish in product(SHAPES, range(1, 28), ((True, False), (False, True), (True, True))):
        yield layers, ParallelSection(pipeline=stages, chunks=chunks, embedding_as_layer=wish[0], loss_as_layer=wish[1])


def possible(layers: int, parallel: ParallelSection) -> bool:
    """By trying every number of layers that a place of the other stages may hold."""
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    inner = parallel.pipeline - (first is not None) - (last is not None)
    return any(
        (first or 0) + (last or 0) + inner * parallel.chunks * each == layers for each in range(layers + 1)
    ) and not any(count % parallel.chunks for count in (first or 0, last or 0))


def fixes(refusal: InputError) -> Iterator[tuple[str, int]]:
    """(key, number) of every number that the fix offers."""
    for key, numbers in re.findall(r"set (\S+) to (\d+(?: or \d+)?)", refusal.fix):
        yield from ((key, int(number)) for number in numbers.split(" or "))


def test_fixed_ends_hold_what_was_asked_and_the_others_the_same() -> None:
    accepted = 0
    for (layers, parallel), layout in product(fixed_ends(), LAYOUTS):
        if not possible(layers, parallel):
            continue
        places = split(layers, parallel, layout)
        assert [layer for place in places for layer in place.layers] == list(range(layers))
        stages = by_stage(places)
        assert all(len(set(chunks)) == 1 for chunks in stages), "a stage's layers are split evenly over its chunks"
        totals = [sum(chunks) for chunks in stages]
        if parallel.first_stage_layers is not None:
            assert totals.pop(0) == parallel.first_stage_layers
        if parallel.last_stage_layers is not None:
            assert totals.pop() == parallel.last_stage_layers
        assert len(set(totals)) <= 1
        accepted += 1
    assert accepted > 400


def test_counted_ends_hold_one_layer_fewer_than_the_others() -> None:
    accepted = 0
    for (layers, parallel), layout in product(counted_ends(), LAYOUTS):
        extra = parallel.embedding_as_layer + parallel.loss_as_layer
        places = parallel.pipeline * parallel.chunks
        if (layers + extra) % places:
            continue
        held = split(layers, parallel, layout)
        assert [layer for place in held for layer in place.layers] == list(range(layers))
        counts = [len(place.layers) for place in held]
        counts[0] += parallel.embedding_as_layer
        counts[-1] += parallel.loss_as_layer
        assert counts == [(layers + extra) // places] * places
        accepted += 1
    assert accepted > 200


def test_every_impossible_split_is_refused_with_numbers_that_work() -> None:
    refused = tried = 0
    for layers, parallel in (*fixed_ends(), *counted_ends()):
        extra, places = parallel.embedding_as_layer + parallel.loss_as_layer, parallel.pipeline * parallel.chunks
        if (layers + extra) % places == 0 if extra else possible(layers, parallel):
            continue
        with pytest.raises(InputError) as caught:
            split(layers, parallel, looped_layout)
        assert f"parallel.layers as {places} counts instead" in caught.value.fix
        for key, number in fixes(caught.value):
            section, _, name = key.partition(".")
            if section == "model":
                split(number, parallel, vee_layout)
            else:
                split(layers, parallel.model_copy(update={name: number}), vee_layout)
            tried += 1
        refused += 1
    assert refused > 1000
    assert tried > 2000


@pytest.mark.parametrize(("layout", "counts"), [(looped_layout, (3, 1, 2, 3, 1, 2)), (vee_layout, (3, 1, 2, 2, 1, 3))])
def test_places_follow_the_layout(layout: Layout, counts: tuple[int, ...]) -> None:
    parallel = ParallelSection(pipeline=3, chunks=2, first_stage_layers=6, last_stage_layers=4)
    assert tuple(len(place.layers) for place in split(12, parallel, layout)) == counts


@pytest.mark.parametrize("layers", range(1, 5))
def test_one_place_holds_everything_whatever_is_counted(layers: int) -> None:
    parallel = ParallelSection(embedding_as_layer=True, loss_as_layer=True)
    assert layer_counts(layers, parallel, [0]) == (layers,)


def test_a_model_of_which_nobody_says_the_size_gets_one_that_splits() -> None:
    for layers, parallel in (*fixed_ends(), *counted_ends()):
        ends = {parallel.first_stage_layers, parallel.last_stage_layers}
        nothing_left = parallel.pipeline == 2 and ends == {0}
        if layers == 1 and not nothing_left and not any((end or 0) % parallel.chunks for end in ends):
            split(natural_layers(parallel), parallel, looped_layout)
    assert natural_layers(ParallelSection(pipeline=4, chunks=2)) == 8
    assert natural_layers(ParallelSection(pipeline=1, first_stage_layers=0, last_stage_layers=0)) == 1
    assert natural_layers(ParallelSection(pipeline=2, layers=(3, 4))) == 7
    assert natural_layers(ParallelSection(pipeline=4, first_stage_layers=3)) == 6
    assert natural_layers(ParallelSection(pipeline=4, embedding_as_layer=True, loss_as_layer=True)) == 2


def held(*configs: Any, **arguments: Any) -> list[tuple[int, list[int]]]:
    return [(place.stage, list(place.layers)) for place in resolved(*configs, **arguments).layout]


def test_a_run_is_split_by_stage_wherever_its_schedule_puts_the_places() -> None:
    sets = ["model.num_layers=6", f"parallel.{FIRST}=4", f"parallel.{LAST}=2"]
    assert held(plugins=["schedule=1f1b"], sets=sets) == [(0, [0, 1, 2, 3]), (1, [4, 5])]
    assert held(plugins=["schedule=interleaved"], sets=sets) == [(0, [0, 1]), (1, [2]), (0, [3, 4]), (1, [5])]
    folded = held(plugins=["schedule=zero-bubble,variant=v"], sets=sets)
    assert folded == [(0, [0, 1]), (1, [2]), (1, [3]), (0, [4, 5])]


def test_a_run_counts_the_embedding_and_the_loss_as_layers() -> None:
    sets = ["model.num_layers=6", f"parallel.{EMBEDDING}=true", f"parallel.{LOSS}=true"]
    folded = held(plugins=["schedule=zero-bubble,variant=v"], sets=sets)
    assert folded == [(0, [0]), (1, [1, 2]), (1, [3, 4]), (0, [5])]


@pytest.mark.parametrize(
    ("sets", "line"),
    [
        (
            "pipeline=3 first_stage_layers=3 last_stage_layers=3",
            (
                "parallel.first_stage_layers=3 and parallel.last_stage_layers=3 are more than the model has: 6 of 4 "
                "layers (from preset:tiny line 5 column 3 and --set parallel.first_stage_layers and --set "
                "parallel.last_stage_layers); set parallel.first_stage_layers to 1, or set parallel.last_stage_layers "
                "to 1, or set model.num_layers to 6, or give parallel.layers as 3 counts instead, with --set "
                "parallel.first_stage_layers=null --set parallel.last_stage_layers=null"
            ),
        ),
        (
            "pipeline=4 last_stage_layers=2",
            (
                "parallel.last_stage_layers=2 leaves 2 of 4 layers: they do not divide over the places of the other "
                "stages, 3 (from preset:tiny line 5 column 3 and --set parallel.last_stage_layers); set "
                "parallel.last_stage_layers to 1 or 4, or set model.num_layers to 2 or 5, or give parallel.layers as 4 "
                "counts instead, with --set parallel.last_stage_layers=null"
            ),
        ),
        (
            "first_stage_layers=1 last_stage_layers=2",
            (
                "parallel.first_stage_layers=1 and parallel.last_stage_layers=2 leave 1 of 4 layers: there is no stage "
                "between the first and the last (from preset:tiny line 5 column 3 and --set "
                "parallel.first_stage_layers and --set parallel.last_stage_layers); set parallel.first_stage_layers to "
                "2, or set parallel.last_stage_layers to 3, or set model.num_layers to 3, or give parallel.layers as 2 "
                "counts instead, with --set parallel.first_stage_layers=null --set parallel.last_stage_layers=null"
            ),
        ),
        (
            "pipeline=1 first_stage_layers=4",
            (
                "parallel.first_stage_layers needs at least two stages: with parallel.pipeline=1 the first stage is "
                "the last one too (from --set parallel.pipeline and --set parallel.first_stage_layers); leave it to "
                "the even split: --set parallel.first_stage_layers=null"
            ),
        ),
        (
            "loss_as_layer=true",
            (
                "5 layers do not divide over 2 stages x 1 chunk = 2 places: 4 of the model, and one for "
                "parallel.loss_as_layer (from preset:tiny line 5 column 3 and --set parallel.loss_as_layer); set "
                "model.num_layers to 3 or 5, or give parallel.layers as 2 counts instead, with --set "
                "parallel.loss_as_layer=false"
            ),
        ),
        (
            "layers=3,1 first_stage_layers=3",
            (
                "parallel.layers and parallel.first_stage_layers exclude each other: each says in its own way how the "
                "layers are split (from --set parallel.layers and --set parallel.first_stage_layers); to "
                "keep parallel.layers: --set parallel.first_stage_layers=null; to keep parallel.first_stage_layers: "
                "--set parallel.layers="
            ),
        ),
    ],
)
def test_what_cannot_be_split_is_said_with_its_arithmetic(sets: str, line: str) -> None:
    words = [f"parallel.{word}" for word in sets.split()]
    assert mistake(plugins=["schedule=1f1b"], sets=words) == (line, ExitCode.INPUT)


def test_a_stages_layers_divide_over_its_chunks() -> None:
    line, code = mistake(plugins=["schedule=interleaved"], sets=["parallel.first_stage_layers=3", "model.num_layers=8"])
    assert line == (
        "parallel.first_stage_layers=3 does not divide over the chunks of a stage: parallel.chunks is 2 (from the "
        "suggestion of schedule=interleaved and --set parallel.first_stage_layers); set parallel.first_stage_layers to "
        "2 or 4, or give parallel.layers as 4 counts instead, with --set parallel.first_stage_layers=null"
    )
    assert code == ExitCode.INPUT


WAYS = {"layers": "1,3", "first_stage_layers": 1, "embedding_as_layer": True}


@pytest.mark.parametrize("left_out", [(), *((key,) for key in WAYS)])
def test_two_ways_of_splitting_are_refused_and_named(left_out: tuple[str, ...]) -> None:
    sets = [f"parallel.{key}={str(value).lower()}" for key, value in WAYS.items() if key not in left_out]
    line, code = mistake(plugins=["schedule=1f1b"], sets=sets)
    said = " and ".join(f"parallel.{key}" for key in WAYS if key not in left_out)
    assert line.startswith(f"{said} exclude each other: ")
    assert code == ExitCode.INPUT
    kept = re.findall(r"to keep parallel\.(\w+): ((?:--set \S+ ?)+)", line.replace(";", " "))
    assert [key for key, _ in kept] == [key for key in WAYS if key not in left_out]
    file = {"parallel": {key: value for key, value in WAYS.items() if key not in left_out}}
    file["parallel"] |= {"layers": [1, 3]} if "layers" in file["parallel"] else {}
    for key, unset in kept:
        layers = ["model.num_layers=5"] if key == "embedding_as_layer" else []
        sets = [*unset.replace("--set ", "").split(), *layers]
        places = [len(layers) for _, layers in held("preset:tiny", file, plugins=["schedule=1f1b"], sets=sets)]
        assert places == ([2, 3] if layers else [1, 3])


@pytest.mark.parametrize(
    "wish", [{"pipeline": 4, LAST: 2}, {"pipeline": 2, LOSS: True}, {"pipeline": 2, FIRST: 1, LAST: 2}]
)
def test_counts_may_replace_what_cannot_be_split_as_the_refusal_says(wish: dict[str, int | bool]) -> None:
    file = {"parallel": wish}
    line, _ = mistake("preset:tiny", file, plugins=["schedule=1f1b"])
    counts, unset = re.findall(r"give parallel\.layers as (\d) counts instead, with ((?:--set \S+ ?)+)$", line)[0]
    given = [0] * (int(counts) - 1) + [4]
    sets = [*unset.replace("--set ", "").split(), f"parallel.layers={','.join(map(str, given))}"]
    assert [len(layers) for _, layers in held("preset:tiny", file, plugins=["schedule=1f1b"], sets=sets)] == given


def test_unsetting_a_files_way_makes_room_for_another() -> None:
    file = {"parallel": {"layers": [1, 3], "first_stage_layers": 3, "loss_as_layer": True}}
    sets = ["parallel.layers=", "parallel.loss_as_layer=false"]
    assert held("preset:tiny", file, plugins=["schedule=1f1b"], sets=sets) == [(0, [0, 1, 2]), (1, [3])]


@pytest.mark.parametrize("text", ["first_stage_layers=-1", "last_stage_layers=half", "loss_as_layer=2"])
def test_what_is_no_count_is_refused_with_its_bound(text: str) -> None:
    line, code = mistake(plugins=["schedule=1f1b"], sets=[f"parallel.{text}"])
    assert line.startswith(f"parallel.{text}: it must be ")
    assert code == ExitCode.INPUT


IGNORES = "return looped_layout(replace(spec, counts=()))"
MOVES = """
where = range(spec.stages) if spec.layers == spec.stages else reversed(range(spec.stages))
return tuple(Place(stage, 0, layers) for stage, layers in zip(where, split_layers(spec)))
"""


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (IGNORES, "place 0 of the layout (stage 0, chunk 0) holds 2 layers: the user asked for 1"),
        (MOVES, "place 0 of the layout (stage 0, chunk 0) is stage 1, chunk 0 when the number of layers changes"),
        ("return [None]", "gives no legal plan: place 0 of the layout is None"),
    ],
)
def test_a_schedule_that_splits_otherwise_is_at_fault(layout: str, says: str, tmp_path: Path) -> None:
    body = "".join(f"        {line}\n" for line in layout.strip().splitlines())
    actions = 'return [[Action(op, m, 0) for op in "FB" for m in range(spec.microbatches)]] * spec.stages'
    mine = tmp_path / "mine.py"
    schedule_file(mine, actions=actions)
    source = mine.read_text(encoding="utf-8")
    names = "Place, looped_layout, split_layers"
    head = f"from dataclasses import replace\nfrom megatron_run.contracts.schedule import {names}\n"
    method = f"    def layout(self, spec):\n{body}\n    def actions"
    mine.write_text(head + source.replace("    def actions", method, 1), encoding="utf-8")
    line, code = mistake(plugins=[f"schedule={mine}"], sets=["parallel.pipeline=2", "parallel.first_stage_layers=1"])
    assert says in line
    assert code == ExitCode.PLUGIN


def test_counts_of_the_wrong_number_are_the_users_whatever_the_schedule_makes_of_them(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    actions = 'return [[Action(op, m, 0) for op in "FB" for m in range(spec.microbatches)]] * spec.stages'
    schedule_file(mine, actions=actions)
    head = "from dataclasses import replace\nfrom megatron_run.contracts.schedule import looped_layout\n"
    source = mine.read_text(encoding="utf-8")
    method = f"    def layout(self, spec):\n        {IGNORES}\n\n    def actions"
    mine.write_text(head + source.replace("    def actions", method, 1), encoding="utf-8")
    for counts in ("4", "2,1,1"):
        line, code = mistake(plugins=[f"schedule={mine}"], sets=["parallel.pipeline=2", f"parallel.layers={counts}"])
        given = "1 count" if counts == "4" else "3 counts"
        assert line.startswith(f"parallel.layers has {given} for 2 stages x 1 chunk (from ")
        assert code == ExitCode.INPUT
