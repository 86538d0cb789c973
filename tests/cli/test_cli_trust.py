"""Who may make whom run what: a configuration's files run where a run is planned or trained, and never to be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_run.config.request import Request
from megatron_run.contracts.plugin import RUN_KINDS
from megatron_run.errors import ExitCode, RunError
from megatron_run.planning import load_config, resolve
from megatron_run_cli.main import main
from megatron_run_engine.run_folder import open_run_folder
from tests.support.plugin_file import schedule_file

Output = pytest.CaptureFixture[str]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration in which a file is named wherever one may be; each says that it ran."""
    sections = {}
    for kind in RUN_KINDS:
        file = tmp_path / f"my_{kind.replace('-', '_')}.py"
        file.write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).write_text({kind!r})\n")
        sections[kind.replace("-", "_")] = {"use": [str(file)] if kind in ("observer", "parallel-layer") else str(file)}
    sections["model"]["num_layers"] = 4  # type: ignore[assignment]
    sections["train"] = {"steps": 3, "lr": 1e-3, "global_batch_size": 4, "micro_batch_size": 1, "sequence_length": 8}  # type: ignore[dict-item]
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(sections))
    return path


@pytest.mark.parametrize(
    "words",
    [
        ("config", "show"),
        ("config", "show", "--json"),
        ("config", "explain", "train.lr"),
        ("config", "explain", "schedule"),
        ("plugins", "why", "schedule"),
    ],
    ids=" ".join,
)
def test_what_reads_a_configuration_runs_none_of_its_files(
    config: Path, capsys: Output, words: tuple[str, ...]
) -> None:
    code = main([*words, str(config)])
    said = capsys.readouterr()
    assert not (config.parent / "ran").exists(), (config.parent / "ran").read_text()
    assert code == ExitCode.DONE, said.err
    if words[:2] == ("config", "show"):
        assert "my_schedule.py" in said.out
        assert "schedule=my_schedule is a file, which was not run" in said.err


def test_an_update_rule_in_a_file_is_not_run_either(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "lion.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    assert main(["config", "show", "preset:tiny", "--set", f"optimizer.rule={tmp_path}/lion.py:Lion"]) == 0
    assert not (tmp_path / "ran").exists()
    assert "lion.py:Lion" in capsys.readouterr().out
    with pytest.raises(RunError):
        resolve(Request(("preset:tiny",), sets=(f"optimizer.rule={tmp_path}/lion.py:Lion",)))
    assert (tmp_path / "ran").exists(), "planning a run asks the optimizer, which runs it"


@pytest.mark.parametrize("command", ["list", "verify", "inspect"])
def test_what_reads_saved_steps_runs_nothing_of_the_run_folder(config: Path, capsys: Output, command: str) -> None:
    run = config.parent / "run"
    open_run_folder(load_config("preset:tiny", sets={"run.folder": run})).lock.release()
    (run / "config.yaml").write_bytes(config.read_bytes())
    (run / "checkpoints" / "step3").mkdir(parents=True)
    (run / "checkpoints" / "step3" / "manifest.json").write_text("{}")
    assert main(["checkpoint", command, str(run)]) in (ExitCode.DONE, ExitCode.DATA)
    capsys.readouterr()
    assert not (config.parent / "ran").exists()


def test_a_file_that_a_run_folder_names_is_announced_and_one_of_the_users_own_is_not(tmp_path: Path) -> None:
    file = schedule_file(tmp_path / "mine.py")
    (tmp_path / "own.yaml").write_text(f"schedule: {file}\n")
    open_run_folder(load_config("preset:tiny", sets={"run.folder": tmp_path / "run"})).lock.release()
    for inside in ("config.yaml", "logs/attempt-001/config.yaml"):
        (tmp_path / "run" / inside).write_text(f"schedule: {file}\n")
        run = resolve(Request(("preset:tiny", str(tmp_path / "run" / inside))))
        assert any(f"is code that runs: {file}, chosen by a run folder" in notice for notice in run.notices)
    for request in (
        Request(("preset:tiny", str(tmp_path / "own.yaml"))),
        Request(("preset:tiny",), plugins=(f"schedule={file}",)),
    ):
        assert not any("is code that runs" in notice for notice in resolve(request).notices)


def test_a_file_of_another_user_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = schedule_file(tmp_path / "mine.py")
    (tmp_path / "own.yaml").write_text(f"schedule: {file}\n")
    user = Path(file).stat().st_uid + 1
    monkeypatch.setattr("os.geteuid", lambda: user)
    notices = resolve(Request(("preset:tiny", str(tmp_path / "own.yaml")))).notices
    assert any("own.yaml belongs to another user" in notice for notice in notices)
