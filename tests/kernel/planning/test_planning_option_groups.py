"""Groups of a plugin's options: set by dotted keys, by mappings, and refused with the key that was meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_run.config.values import flat, nested
from tests.support.plugin_file import schedule_file
from tests.support.resolving import TINY, mistake, mistakes, resolved

FILE = "from the configuration given from Python"
GROUPED = """
class Shape(Group):
    depth: int = Field(1, ge=1, description="how deep")
    kind: Literal["round", "square"] = Field("round", description="of which kind")

depth: int = Field(1, description="of another thing")
shape: Shape = Field(Shape(), description="its shape")

@model_validator(mode="after")
def _deep_enough(self):
    if self.shape.depth < self.depth:
        raise fault_at(self, "shape.depth", "it is too flat; set it to at least {}".format(self.depth))
    return self
"""
IMPORTS = """
from typing import Literal

from pydantic import model_validator

from megatron_run.contracts.option_groups import Group, fault_at
"""


def grouped(path: Path, options: str = GROUPED) -> str:
    """A schedule of a third party, whose options have a group."""
    file = Path(schedule_file(path, options=options))
    file.write_text(IMPORTS + file.read_text())
    return str(file)


def test_a_group_of_a_plugin_in_a_file_is_set_key_by_key_from_each_source(tmp_path: Path) -> None:
    config = {"schedule": {"use": grouped(tmp_path / "mine.py"), "shape": {"kind": "square", "depth": 2}}}
    run = resolved(TINY, config, sets=["schedule.shape.depth=3"])
    assert run.config.schedule.options == {"depth": 1, "shape": {"depth": 3, "kind": "square"}}
    assert str(run.origins["schedule", "shape", "depth"]) == "--set schedule.shape.depth"
    assert str(run.origins["schedule", "shape", "kind"]) == "the configuration given from Python"
    assert resolved(TINY, config, sets={"schedule.shape": {"depth": 5}}).config.schedule.options["shape"]["depth"] == 5


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("shape_depth=3", "unknown key schedule.shape_depth ({}); did you mean 'schedule.shape.depth'?"),
        ("kind=round", "unknown key schedule.kind ({}); did you mean 'schedule.shape.kind'?"),
        ("shape.deep=3", "unknown key schedule.shape.deep ({}); did you mean 'depth'?"),
        ("shape.depth=x", "schedule.shape.depth=x: it must be a whole number ({})"),
        ("shape.depth=0", "schedule.shape.depth=0: it must be at least 1 ({})"),
        ("shape=3", "schedule.shape is a group of keys, not a value ({}); set schedule.shape.depth"),
        ("shape=square", "schedule.shape is a group of keys, not a value ({}); set schedule.shape.kind"),
        ("depth=2", "schedule.shape.depth=1: it is too flat; set it to at least 2"),
    ],
)
def test_a_mistake_in_a_group_of_a_third_party_names_the_key(text: str, line: str, tmp_path: Path) -> None:
    mine = grouped(tmp_path / "mine.py")
    expected = line.format(f"from --set schedule.{text.partition('=')[0]}")
    assert mistake(TINY, {"schedule": {"use": mine}}, sets=[f"schedule.{text}"]) == (expected, 2)


@pytest.mark.parametrize(("data", "key"), [(3, "depth"), ("square", "kind"), (None, "depth"), ([1], "depth")])
def test_a_value_for_a_group_in_a_file_is_refused_with_a_key_that_takes_it(data: Any, key: str, tmp_path: Path) -> None:
    (problem,) = mistakes(TINY, {"schedule": {"use": grouped(tmp_path / "mine.py"), "shape": data}})
    assert str(problem) == f"schedule.shape is a group of keys, not a value ({FILE}); set schedule.shape.{key}"


def test_a_key_of_a_group_that_another_plugin_has_in_part_is_dropped_with_a_notice(tmp_path: Path) -> None:
    mine = grouped(tmp_path / "mine.py")
    other = grouped(tmp_path / "other.py", GROUPED.replace('    kind: Literal["round", "square"]', "    sort: str"))
    config = {"schedule": {"use": mine, "shape": {"depth": 3, "kind": "square"}}}
    run = resolved(TINY, config, plugins=[f"schedule={other}"])
    assert run.config.schedule.options["shape"] == {"depth": 3, "sort": "round"}
    assert run.notices == ("schedule=other has no schedule.shape.kind, written for another schedule: dropped",)
    wrong = mistake(TINY, {"schedule": {"use": other, "shape": {"kind": "square"}}})
    assert wrong == (
        f"unknown key schedule.shape.kind ({FILE}); schedule.shape has depth, sort",
        2,
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model.rope_theta=1", "did you mean 'model.rope.theta'?"),
        ("model.top_k=1", "did you mean 'model.experts.top_k'?"),
        ("model.router_bias_rate=1", "did you mean 'model.experts.router.bias_rate'?"),
        ("model.expert_ffn_size=1", "did you mean 'model.experts.ffn_size'?"),
        ("model.attention_window=1", "did you mean 'model.attention.window'?"),
        ("model.experts=8", "set model.experts.count"),
        ("model.norm=rmsnorm", "set model.norm.kind"),
        ("model.rope=yarn", "set model.rope.scaling"),
    ],
)
def test_a_flat_name_of_gpt_is_answered_with_that_of_its_group(text: str, told: str) -> None:
    line, code = mistake(sets=[text])
    assert (line.rpartition("; ")[2], code) == (told, 2)


def test_a_dotted_name_in_a_mapping_is_answered_with_how_to_nest_it() -> None:
    line, _ = mistake(TINY, {"model": {"experts.router.groups": 2}})
    assert line.endswith("; nest it: experts: {router: {groups: ...}}")


def test_nested_and_flat_names_are_each_others_inverse() -> None:
    data = {"model": {"use": "gpt", "rope": {"theta": 1.0}, "empty": {}}, "version": 1}
    assert flat(data) == {"model.use": "gpt", "model.rope.theta": 1.0, "model.empty": {}, "version": 1}
    assert nested(flat(data)) == data
    assert nested({"model": {"rope": {"theta": 1}}, "model.rope.theta": 2}) == {"model": {"rope": {"theta": 2}}}
