"""A plugin sees the whole configuration before anything is started: it says what is worth saying, or refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_run.errors import ExitCode
from tests.support.plugin_file import schedule_file
from tests.support.resolving import mistake, mistakes, resolved

#: A body of the check, with the configuration and the options.
CHECK = "check_config=lambda config, options: {body}"
RAISES = "check_config=lambda config, options: (_ for _ in ()).throw({error})"


def plugin(tmp_path: Path, info: str) -> str:
    file = tmp_path / "mine.py"
    schedule_file(file, options="depth: int = 3", info=info)
    return f"schedule={file}"


def test_what_it_says_is_a_notice(tmp_path: Path) -> None:
    body = "[f'{config.train.lr} over {config.parallel.data} copies', f'depth {options.depth}']"
    run = resolved(plugins=[plugin(tmp_path, CHECK.format(body=body)) + ",depth=5"], nproc=2)
    assert run.notices == ("0.001 over 2 copies", "depth 5")


def test_it_sees_every_section_with_defaults_and_suggestions(tmp_path: Path) -> None:
    body = "[f'{config.scaler.use} {config.optimizer.options[\"eps\"]} {config.parallel.pipeline}']"
    run = resolved(plugins=[plugin(tmp_path, f'suggests={{"parallel.pipeline": 2}}, {CHECK.format(body=body)}')])
    assert run.notices[-1] == "none 1e-08 2"


def test_it_may_refuse_and_the_keys_it_names_are_traced(tmp_path: Path) -> None:
    error = "__import__('megatron_run').RunError('mine wants no train.lr=0.5', fix='lower it')"
    line, code = mistake(plugins=[plugin(tmp_path, RAISES.format(error=error))], sets=["train.lr=0.5"])
    assert line == "mine wants no train.lr=0.5 (from --set train.lr); lower it"
    assert code == ExitCode.INPUT


def test_it_is_not_asked_about_a_configuration_that_is_wrong(tmp_path: Path) -> None:
    error = "__import__('megatron_run').RunError('mine has its own opinion')"
    (problem,) = mistakes(plugins=[plugin(tmp_path, RAISES.format(error=error))], sets=["train.lr=0"])
    assert str(problem).startswith("train.lr=0: it must be above 0")


@pytest.mark.parametrize(
    ("info", "why"),
    [
        (RAISES.format(error="ZeroDivisionError('oops')"), "check_config failed: ZeroDivisionError: oops"),
        (CHECK.format(body="'a word'"), "check_config failed: it returned 'a word', and must return texts"),
        (CHECK.format(body="[3]"), "check_config failed: it returned [3], and must return texts"),
        (CHECK.format(body="None"), "check_config failed: TypeError: 'NoneType' object is not iterable"),
        ("check_config=3", "says check_config=3, which must be a function of the configuration and the options, or"),
    ],
)
def test_a_check_that_is_wrong_is_the_plugins_fault(info: str, why: str, tmp_path: Path) -> None:
    chosen = plugin(tmp_path, info)
    line, code = mistake(plugins=[chosen])
    assert why in line
    assert "mine.py" in line
    assert code == ExitCode.PLUGIN
