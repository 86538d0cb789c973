"""``import`` and ``export``: words, output, exit codes; what is exchanged is tested beside the code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_run_cli.main import main
from tests.support.small_models import GPT2, saved_network

Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a saved step 7."""
    folder = tmp_path_factory.mktemp("exchange") / "run"
    saved_network(folder, GPT2, moments=True)
    return folder


def told(capsys: Output, *words: object, code: int = 0) -> str:
    assert main(list(map(str, words))) == code
    said = capsys.readouterr()
    return said.err if code else said.out


def test_there_and_back_with_both_formats(run: Path, tmp_path: Path, capsys: Output) -> None:
    for name in ("huggingface", "distributed"):
        there, back = tmp_path / name, tmp_path / f"{name}-back"
        assert told(capsys, "export", run, there, "--to", name) == (
            f"{name}: step 7 of {run / 'checkpoints'}: {there}\n"
        )
        text = told(capsys, "import", there, back, "--trust-pickle")
        assert text.splitlines()[0].startswith(f"{name}: ")
        next_command = (
            f"finetune {back} --data YOURS.txt" if name == "huggingface" else f"{back}/config.yaml YOURS.yaml"
        )
        assert text.endswith(f": megatron-run {next_command}\n")
        kept = "the optimizer's state (exp_avg, step) is kept for an export; training starts from the weights alone, at"
        assert (kept in text) == (name == "distributed")
        assert "whole" in told(capsys, "checkpoint", "list", back)


def test_an_export_without_its_folder_says_what_lacks(run: Path, capsys: Output) -> None:
    (run / "run.json").write_text("{}")
    said = told(capsys, "export", run, "--to", "huggingface", code=2)
    assert f"{run} is a run, and FOLDER is where its model goes; add a new folder: megatron-run export {run} " in said
    (run / "run.json").unlink()


def test_the_configuration_of_an_import_configures_a_run(run: Path, tmp_path: Path, capsys: Output) -> None:
    told(capsys, "export", run, tmp_path / "hf", "--to", "huggingface")
    told(capsys, "import", tmp_path / "hf", tmp_path / "ours", "--from", "huggingface")
    sets = ("train.steps=1", "train.global_batch_size=1", "data.use=mock", "data.vocab_size=61")
    words = [word for key in sets for word in ("--set", key)]
    text = told(capsys, tmp_path / "ours" / "config.yaml", *words, "--dry-run")
    said = json.loads(told(capsys, "import", tmp_path / "hf", tmp_path / "again", "--json"))
    assert f"parameters of the model: {said['parameters']:,}" in text
    assert (said["format"], said["step"], said["moments"]) == ("huggingface", 0, [])


def test_the_latest_run_and_a_step_may_be_named(
    run: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "latest").symlink_to(run)
    monkeypatch.chdir(tmp_path)
    said = json.loads(told(capsys, "export", "out", "--to", "huggingface", "--json"))
    assert (said["step"], said["folder"]) == (7, "out")
    told(capsys, "export", run / "checkpoints" / "step7", "other", "--to", "huggingface")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "other" / "model.safetensors"
    ).read_bytes()
    assert "there is no checkpoint" in told(capsys, "export", "third", "--to", "huggingface", "--step", 8, code=5)


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_weights_to_start_from_are_looked_for_before_anything_is_started(
    dry: tuple[str, ...], run: Path, tmp_path: Path, capsys: Output
) -> None:
    def start(source: Path, *sets: str) -> str:
        keys = (f"run.init_from={source}", f"run.folder={tmp_path / 'new'}", *sets)
        return told(capsys, "preset:tiny", *(word for key in keys for word in ("--set", key)), *dry, code=5)

    text = start(tmp_path)
    assert f"no checkpoints in {tmp_path}: no step is saved there (from --set run.init_from)" in text
    assert "megatron-run import SOURCE FOLDER" in text
    assert "model.hidden_size=24 there, 32 here" in start(run, "model.num_layers=2")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (("export", "{run}", "{new}", "--to", "hugging"), 2, "did you mean 'huggingface'?"),
        (("export", "{run}", "{run}", "--to", "huggingface"), 2, "exists: nothing is overwritten"),
        (("export", "--to", "huggingface"), 2, "expected [SOURCE] FOLDER"),
        (("export", "{run}", "{new}"), 2, "--to"),
        (("import", "{run}", "{new}"), 5, "in no format that is known"),
        (("import", "{run}/nowhere", "{new}"), 5, "there is no"),
        (("import", "{run}", "{new}", "--from", "gguf"), 2, "known are distributed, huggingface, megatron"),
    ],
)
def test_mistakes_are_one_line(
    words: tuple[str, ...], code: int, why: str, run: Path, tmp_path: Path, capsys: Output
) -> None:
    text = told(capsys, *(word.format(run=run, new=tmp_path / "new") for word in words), code=code)
    assert why in text
    assert text.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_a_damaged_newest_step_names_the_older_one_and_what_to_type(tmp_path: Path, capsys: Output) -> None:
    for step in (7, 8):
        saved_network(tmp_path / "run", GPT2, step=step)
    file = tmp_path / "run" / "checkpoints" / "step8" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    text = told(capsys, "export", tmp_path / "run", tmp_path / "new", "--to", "huggingface", code=5)
    assert f"{file} is damaged: its SHA-256 is not that of the manifest; " in text
    assert text.endswith("; to export step 7: --step 7\n")
    words = text.rpartition(": ")[2].split()
    told(capsys, "export", tmp_path / "run", tmp_path / "new", "--to", "huggingface", *words)
