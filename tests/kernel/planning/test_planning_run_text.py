"""A run that another process takes over is the one that was handed over, to the last origin and action."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_run.contracts import Observer, PluginInfo
from megatron_run.errors import PluginError
from megatron_run.planning.run import comparison_table
from megatron_run.planning.run_text import hand_over, take_over
from tests.support.fake_plugins import schedule_source
from tests.support.plugin_file import schedule_file
from tests.support.resolving import resolved

#: Options of many shapes: nested groups, lists, mappings, paths, spans, several plans of a ramp, uneven stages.
RUNS: dict[str, dict[str, Any]] = {
    "nested": {"plugins": ["optimizer=zero1"], "sets": ["model.rope.theta=5000", "model.experts.count=4"], "nproc": 2},
    "lists": {"plugins": ["parallel-layer=dense+lora", "data=mock"], "sets": ["train.recompute=attn,mlp"]},
    "ramp": {
        "plugins": ["schedule=interleaved"],
        "sets": [
            "train.ramp_up.start=8",
            "train.ramp_up.increment=8",
            "train.ramp_up.samples=64",
            "train.global_batch_size=32",
            "eval.interval=5%",
        ],
    },
    "halves": {"plugins": ["schedule=zero-bubble"], "sets": ["parallel.pipeline=2", "model.num_layers=4"]},
    "observers": {"plugins": ["observer=console,jsonl"], "sets": ["run.folder=~/runs/mine", "run.time_limit=1h"]},
}


def check(run: Any, *objects: object) -> None:
    taken = take_over(hand_over(run), objects)
    assert taken == run
    assert comparison_table(taken) == comparison_table(run)
    assert hand_over(taken) == hand_over(run)


@pytest.mark.parametrize("preset", ["tiny", "laptop", "eight-gpus"])
def test_a_preset_is_taken_over_as_it_is(preset: str) -> None:
    check(resolved(f"preset:{preset}"))


@pytest.mark.parametrize("asked", RUNS.values(), ids=RUNS)
def test_options_plans_and_origins_are_taken_over_as_they_are(asked: dict[str, Any]) -> None:
    check(resolved(**asked))


def test_a_file_is_imported_where_it_is_taken_over(tmp_path: Path) -> None:
    run = resolved(plugins=[f"schedule={schedule_file(tmp_path / 'mine.py')}"], nproc=2)
    assert comparison_table(take_over(hand_over(run))) == comparison_table(run)
    (tmp_path / "mine.py").write_text("raise ValueError('not today')")
    with pytest.raises(PluginError, match="ValueError: not today"):
        take_over(hand_over(run))


class Watching(Observer):
    info = PluginInfo("observer", "watching")


def test_an_object_is_only_named_and_whoever_takes_over_brings_it() -> None:
    watching = Watching()
    run = resolved(plugins=[watching])
    check(run, watching)
    with pytest.raises(PluginError, match="observer=watching is not here: it is an object of the program"):
        take_over(hand_over(run))


PLUGIN = """
from typing import Any
from pydantic import BaseModel, ConfigDict, Field, SecretStr
class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    {field}
"""


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ('key: SecretStr = SecretStr("")', "key=s3"),
        ("size: int = Field(1, exclude=True)", "size=3"),
        ("shape: Any = (1, 2)", ""),
    ],
)
def test_options_that_ranks_would_read_otherwise_are_refused(tmp_path: Path, field: str, value: str) -> None:
    file = tmp_path / "mine.py"
    source = schedule_source().replace('"zigzag")', '"zigzag", options=Options)')
    file.write_text(PLUGIN.replace("{field}", field) + source.replace("create_schedule()", "create_schedule(options)"))
    run = resolved(plugins=[f"schedule={file}{',' if value else ''}{value}"])
    with pytest.raises(PluginError, match=r"the options of schedule=.* cannot be handed to ranks: what is written"):
        hand_over(run)


def test_a_plugin_that_was_edited_since_is_refused(tmp_path: Path) -> None:
    file = Path(schedule_file(tmp_path / "mine.py"))
    handed = hand_over(resolved(plugins=[f"schedule={file}"], nproc=2))
    file.write_text(file.read_text() + "\nLATER = True\n")
    with pytest.raises(PluginError, match="mine has changed: its sources are not those"):
        take_over(handed)
