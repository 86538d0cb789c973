"""Who may make whom run what: a configuration's files run where a run is planned or trained, and never to be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_run import load
from megatron_run.config.request import Request
from megatron_run.contracts.plugin import RUN_KINDS
from megatron_run.errors import ExitCode, RunError
from megatron_run.planning import load_config, resolve
from megatron_run_cli.main import main
from megatron_run_engine import train
from megatron_run_engine.run_folder import open_run_folder
from tests.support.forked import forked_command
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


@pytest.mark.parametrize("kind", ["model", "parallel-layer"])
def test_an_option_of_a_file_that_is_not_run_is_explained_by_what_runs_it(
    kind: str, config: Path, capsys: Output
) -> None:
    section = kind.replace("-", "_")
    assert main(["config", "explain", f"{section}.g.a", str(config)]) == ExitCode.PLUGIN
    file = config.parent / f"my_{section}.py"
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"megatron-run: the options of {kind}=my_{section} are not known: it is a file, which was not run: {file}; "
        f"to run it and see them, type: megatron-run plugins info {kind}={file}"
    )
    assert not (config.parent / "ran").exists()
    assert main(["plugins", "info", f"{kind}={file}"]) == ExitCode.PLUGIN, "it is no plugin, as its one line says"
    assert (config.parent / "ran").exists()


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


def test_an_update_rule_that_a_run_folder_names_is_announced_and_one_of_the_users_own_is_not(tmp_path: Path) -> None:
    (tmp_path / "lion.py").write_text("import torch\n\nclass Lion(torch.optim.SGD):\n    pass\n")
    rule = f"optimizer: {{rule: '{tmp_path}/lion.py:Lion'}}\n"
    (tmp_path / "own.yaml").write_text(rule)
    open_run_folder(load_config("preset:tiny", sets={"run.folder": tmp_path / "run"})).lock.release()
    (tmp_path / "run" / "config.yaml").write_text(rule)
    for file, announced in ((tmp_path / "run" / "config.yaml", True), (tmp_path / "own.yaml", False)):
        notices = resolve(Request(("preset:tiny", str(file)))).notices
        said = f"optimizer.rule is code that runs: {tmp_path}/lion.py, chosen by a run folder; named at {file}"
        assert any(said in notice for notice in notices) == announced, notices


def test_a_file_of_another_user_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = schedule_file(tmp_path / "mine.py")
    (tmp_path / "own.yaml").write_text(f"schedule: {file}\n")
    user = Path(file).stat().st_uid + 1
    monkeypatch.setattr("os.geteuid", lambda: user)
    notices = resolve(Request(("preset:tiny", str(tmp_path / "own.yaml")))).notices
    assert any("own.yaml belongs to another user" in notice for notice in notices)


MODEL = """
import pathlib
from megatron_run_engine.builtin.model import gpt
megatron_run_plugin_info, megatron_run_create_model = gpt.megatron_run_plugin_info, gpt.megatron_run_create_model
pathlib.Path({ran!r}).touch()
"""


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose model is ``./mine.py``, which says that it ran; ``ran`` is removed. In the folder of both."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MODEL.format(ran=str(tmp_path / "ran")))
    (tmp_path / "a.txt").write_text("abcdefgh. " * 200)
    train(load_config("preset:tiny", sets=_OF_RUN, plugins=["model=./mine.py"]))
    (tmp_path / "ran").unlink()
    return tmp_path


_OF_RUN: dict[str, Any] = {
    "run.folder": "run",
    "run.threads": 1,
    "data.use": "text",
    "data.paths": "a.txt",
    "data.split": "50,25,25",
    "train.steps": 1,
    "eval.interval": 0,
    "eval.sample": 0,
    "observer.use": "jsonl",
}
_PUT_TO_USE: dict[str, tuple[str, ...]] = {
    "generate": ("generate", "run", "a", "--max-new-tokens", "1"),
    "eval": ("eval", "run", "--task", "perplexity=a.txt"),
    "finetune": (
        *("finetune", "run", "--data", "a.txt", "--set", "train.steps=1", "--set", "run.threads=1"),
        *("--set", "eval.batches=1", "--set", "data.split=50,25,25", "--set", "run.folder=tuned"),
    ),
}


@pytest.mark.multiproc
@pytest.mark.parametrize("command", _PUT_TO_USE)
def test_a_model_file_that_a_checkpoint_names_runs_only_when_it_is_typed(
    own_model: Path, capsys: Output, command: str
) -> None:
    assert main([*_PUT_TO_USE[command]]) == ExitCode.PLUGIN
    assert "--plugin model=./mine.py" in capsys.readouterr().err
    assert not (own_model / "ran").exists()
    done = forked_command([*_PUT_TO_USE[command], "--plugin", "model=./mine.py"], own_model)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert (own_model / "ran").exists()


def test_a_run_with_a_model_file_is_loaded_and_goes_on_by_what_its_user_says(own_model: Path) -> None:
    with pytest.raises(RunError, match="is a file and is not run"):
        load("run")
    assert not (own_model / "ran").exists()
    assert load("run", sets=["model.use=./mine.py"]).source.step == 1
    train(load_config("preset:tiny", sets={**_OF_RUN, "train.steps": 2}, plugins=["model=./mine.py"]), extend=True)
    assert load("run", sets=["model.use=./mine.py"]).source.step == 2


@pytest.mark.parametrize("section", ["parallel-layer", "observer"])
def test_layers_and_observers_of_a_found_configuration_are_not_run(
    own_model: Path, capsys: Output, section: str
) -> None:
    """The layers of the last attempt are refused; of its observers those that are installed hear of the numbers."""
    (own_model / "evil.py").write_text(f"import pathlib; pathlib.Path({str(own_model / 'evil')!r}).touch()\n")
    record = own_model / "run" / "config.yaml"
    lines = record.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"{section}:"))
    stop = next((n for n in range(start + 1, len(lines)) if not lines[n].startswith((" ", "-"))), len(lines))
    lines[start:stop] = [f"{section}:", "  use: [jsonl, ./evil.py]" if section == "observer" else "  use: ./evil.py"]
    record.write_text("\n".join(lines) + "\n")
    code = main([*_PUT_TO_USE["eval"], "--plugin", "model=./mine.py"])
    said = capsys.readouterr().err
    assert not (own_model / "evil").exists(), "it ran"
    assert code == (ExitCode.DONE if section == "observer" else ExitCode.PLUGIN), said
    if section == "observer":
        assert "perplexity" in (own_model / "run" / "eval.jsonl").read_text()
    else:
        assert "--plugin parallel-layer=./evil.py" in said
