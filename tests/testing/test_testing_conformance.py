from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from megatron_run.errors import ExitCode, InputError, Problems, RunError
from megatron_run.registry.discover import Catalog
from megatron_run_cli.commands.new_package import write_package
from megatron_run_testing.conformance import Result, check
from tests.support.broken import BROKEN_IN_A_RUN
from tests.support.fake_plugins import schedule_source


def failures(target: Path | str) -> list[Result]:
    (report,) = check(str(target))
    assert report.passed == all(result.passed for result in report.results)
    return [result for result in report.results if not result.passed]


def test_an_installed_plugin_is_named_as_on_the_command_line() -> None:
    (report,) = check("schedule=sequential")
    assert (report.plugin, report.source, report.passed) == ("schedule=sequential", "megatron-run-core 0.1.0", True)
    assert "the action lists are a legal plan" in [result.name for result in report.results]


def test_a_file_needs_no_kind(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    refuses = "from megatron_run.errors import ScheduleError\n        if spec.stages * spec.chunks > 1:\n            "
    refuses += 'raise ScheduleError("one stage", fix="set parallel.pipeline=1")\n        return'
    file.write_text(schedule_source().replace("return", refuses, 1))
    (report,) = check(str(file))
    assert (report.plugin, report.source, report.passed) == ("schedule=mine", str(file), True)
    assert check(f"schedule={file}") == (report,), "as it is written for a run"


def test_what_there_was_nothing_to_try_with_is_not_called_well(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    refuses = "from megatron_run.errors import ScheduleError\n        "
    refuses += 'raise ScheduleError("never", fix="choose 1f1b")\n        return'
    file.write_text(schedule_source().replace("return", refuses, 1))
    (report,) = check(str(file))
    states = {result.name: (result.state, result.message) for result in report.results}
    assert states["it accepts a shape"][0] == "FAILED"
    assert states["a refusal contains a fix"] == ("ok", "")
    assert states["the action lists are a legal plan"] == ("nothing to try", "it accepts no shape")
    (report,) = check("data=mock")
    states = {result.name: (result.state, result.message) for result in report.results}
    assert states["text can be encoded and decoded"] == ("nothing to try", "the data is not text")
    assert states["baselines are losses"] == ("ok", "")
    (report,) = check("observer=console")
    states = {result.name: (result.state, result.message) for result in report.results}
    assert states["traced_steps returns step numbers"] == ("nothing to try", "it traces no step")
    assert states["a second attempt keeps what the first wrote"] == (
        "nothing to try",
        "it writes nothing in the run folder",
    )


@pytest.mark.parametrize(
    ("name", "reason"), [("te", "graph-capture=te needs an NVIDIA GPU"), ("none", "it captures no region")]
)
def test_where_nothing_can_be_captured_there_is_nothing_to_try(name: str, reason: str) -> None:
    (report,) = check(f"graph-capture={name}")
    assert report.passed
    states = {result.name: (result.state, result.message) for result in report.results}
    assert states["regions lie within a layer and may be captured"] == ("ok", "")
    for tried in ("captured steps equal eager ones in losses and gradients", "invalidate returns to eager steps"):
        assert states[tried] == ("nothing to try", reason)


def test_a_broken_promise_is_found_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(schedule_source())  # gives one list, whatever the number of stages
    (failure,) = failures(file)
    assert failure.name == "the action lists are a legal plan"
    assert failure.message.startswith("P=")  # what the suite says, not how it says it


SHARDED = """
import os

import numpy as np

from megatron_run.contracts import DataSource, PluginInfo
from megatron_run.hookspecs import hookimpl


class Sharded(DataSource):
    vocab_size = 64
    rank = int(os.environ.get("RANK", 0))

    def dataset(self, split, sequence_length, seed):
        ids, mask = np.arange(sequence_length) % 32 + self.rank, np.ones(sequence_length, np.float32)
        return [{"tokens": ids, "labels": ids, "loss_mask": mask}]


@hookimpl
def megatron_run_plugin_info():
    return PluginInfo("data", "sharded")


@hookimpl
def megatron_run_create_data():
    return Sharded()
"""


def test_a_file_of_data_is_loaded_anew_as_another_rank_would(tmp_path: Path) -> None:
    file = tmp_path / "sharded.py"
    file.write_text(SHARDED)
    (failure,) = failures(file)
    assert failure.name == "every rank finds the same samples"
    assert "train sample 0 differs in tokens in a process with RANK=3 " in failure.message


def test_a_file_whose_kind_is_unknown_is_named_as_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(schedule_source().replace("create_schedule", "create_shedule"))
    (report,) = check(str(file))
    (result,) = report.results
    assert report.plugin == "mine"
    assert result.message.startswith(f"{file} is no plugin: unknown hook megatron_run_create_shedule; did you mean ")


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("1/0", "it can be imported and describes itself", "ZeroDivisionError: division by zero"),
        ("", "it can be imported and describes itself", "it has no factory hook"),
        (
            schedule_source().replace("return Mine()", "return None"),
            "its factory makes an object of its kind",
            "it returned None, and must return a megatron_run.contracts.Schedule",
        ),
    ],
)
def test_a_plugin_that_cannot_be_made_is_a_failed_check(tmp_path: Path, source: str, name: str, message: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    (failure,) = failures(file)
    assert failure.name == name
    assert message in failure.message


@pytest.mark.parametrize("status", ["'no corpus is installed'", "0"])
def test_a_plugin_that_ends_the_process_has_failed(tmp_path: Path, status: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(BROKEN_IN_A_RUN["outside"][1].replace("ids + 51", f"__import__('sys').exit({status})"))
    assert {failure.message for failure in failures(file)} == {f"SystemExit: {status.strip(chr(39))}"}
    file.write_text(schedule_source().replace("return", f"raise SystemExit({status})\n        return", 1))
    assert {"SystemExit" in failure.message for failure in failures(file)} == {True}


def test_a_package_is_checked_where_it_lies_and_forgotten(tmp_path: Path) -> None:
    package = write_package("schedule", "zigzag", tmp_path / "made", Catalog(()))
    assert failures(package.folder) == []
    module = package.folder / "src" / "megatron_run_schedule_zigzag" / "__init__.py"
    module.write_text(module.read_text().replace("forwards + backwards", "backwards + forwards"))
    (failure,) = failures(package.folder)
    assert failure.name == "the action lists are a legal plan"
    assert "megatron_run_schedule_zigzag" not in sys.modules
    assert not [path for path in sys.path if path.startswith(str(tmp_path))]


def test_options_are_given_as_settings() -> None:
    (report,) = check("data=mock", ["data.vocab_size=7"])
    assert report.passed
    with pytest.raises(Problems) as caught:
        check("data=mock", ["data.vocab_size=1"])
    assert str(caught.value) == "data.vocab_size=1: it must be at least 2 (from --set data.vocab_size)"


def test_options_without_a_default_are_asked_for() -> None:
    with pytest.raises(InputError) as caught:
        check("model=gpt", ["model.num_layers=4"])
    assert str(caught.value) == (
        "model=gpt cannot be tried without model.hidden_size, model.num_heads: these options have no default; "
        "add --set model.hidden_size=... --set model.num_heads=..."
    )
    assert caught.value.exit_code == ExitCode.INPUT


def test_a_file_is_tried_on_top_of_other_layers(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    example = Path(__file__).parents[1] / "examples" / "plugins" / "parallel_layer.py"
    file.write_text(example.read_text(encoding="utf-8"))
    (report,) = check(f"parallel-layer=dense+{file}")
    assert report.source == str(file)
    assert report.results[-1].name == check(str(file))[0].results[-1].name
    with pytest.raises(RunError, match=r"the plugin file \./none\.py cannot be read: there is no "):
        check("parallel-layer=dense+./none.py")


@pytest.mark.parametrize(
    ("target", "code", "message"),
    [
        ("schedule", ExitCode.INPUT, "'schedule' is nothing to check; give KIND=NAME of an installed plugin"),
        ("./nowhere.py", ExitCode.PLUGIN, "the plugin file nowhere.py cannot be read: there is no "),
        ("schedule=nothing", ExitCode.PLUGIN, "no installed plugin is schedule=nothing (from plugins check"),
        ("empty", ExitCode.INPUT, "empty/pyproject.toml cannot be read: "),
        ("plain", ExitCode.INPUT, "plain/pyproject.toml offers no plugin; add its entry point"),
    ],
)
def test_nothing_to_check_says_what_to_type(
    target: str, code: ExitCode, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "pyproject.toml").write_text('[project]\nname = "plain"\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError) as caught:
        check(target)
    assert caught.value.exit_code == code
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ('key: SecretStr = SecretStr("s3")', r"written as .*\*\*\*.* the options .* are read as"),
        ("size: Annotated[int, PlainSerializer(lambda size: f'{size} kB')] = 7", "cannot be written as JSON and read"),
    ],
)
def test_options_that_a_rank_would_read_otherwise_are_a_failure(tmp_path: Path, field: str, message: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from typing import Annotated\n"
        "from pydantic import BaseModel, ConfigDict, PlainSerializer, SecretStr\n"
        f'class Options(BaseModel):\n    model_config = ConfigDict(frozen=True, extra="forbid")\n    {field}\n'
        + schedule_source()
        .replace('"zigzag")', '"zigzag", options=Options)')
        .replace("create_schedule()", "create_schedule(options)")
    )
    (failure,) = [each for each in failures(file) if "options" in each.name]
    assert re.search(message, failure.message)
