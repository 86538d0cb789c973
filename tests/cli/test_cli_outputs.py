"""Files that commands write: never one that the same command reads, with --overwrite or without."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_run_cli.main import main

Output = pytest.CaptureFixture[str]
CONFIG = "# a comment of its author\ntrain: {steps: 2}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a configuration, a link to it, a device, a plugin in a file, and what chooses that."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "link.yaml").symlink_to("c.yaml")
    (tmp_path / "here.yaml").write_text("like: a100\nname: here\n", encoding="utf-8")
    (tmp_path / "mine.py").write_text("no plugin is loaded to know its file\n", encoding="utf-8")
    (tmp_path / "chosen.yaml").write_text("schedule: {use: ./mine.py}\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("plan c.yaml --gpus 1 --overwrite --write c.yaml", "--write"),
        ("plan c.yaml --gpus 1 --overwrite --write link.yaml", "--write"),
        ("plan preset:tiny c.yaml --gpus 1 --timeline c.yaml", "--timeline"),
        ("plan c.yaml --gpus 1 --device here.yaml --overwrite --write here.yaml", "--write"),
        ("plan schedule c.yaml --plugin schedule=./mine.py --overwrite --write mine.py", "--write"),
        ("plan schedule c.yaml --set schedule.use=./mine.py --overwrite --write mine.py", "--write"),
        ("plan schedule chosen.yaml --overwrite --write mine.py", "--write"),
        ("schedule show c.yaml --svg c.yaml", "--svg"),
        ("schedule show --plugin schedule=./mine.py --trace mine.py", "--trace"),
        ("c.yaml --dry-run --svg c.yaml", "--svg"),
        ("c.yaml --dry-run --device here.yaml --svg here.yaml", "--svg"),
    ],
)
def test_no_command_writes_over_what_it_reads(line: str, option: str, folder: Path, capsys: Output) -> None:
    def texts() -> dict[str, bytes]:
        return {each.name: each.read_bytes() for each in folder.iterdir()}

    before, words = texts(), line.split()
    assert main(words) == 2
    told = capsys.readouterr()
    assert told.err == f"megatron-run: {words[-1]} is an input too; name another {option}\n"
    assert told.out == ""
    assert texts() == before


def test_no_dataset_is_written_over_its_tokenizer(folder: Path, capsys: Output) -> None:
    (folder / "text.txt").write_text("a few words, and a few words more\n" * 9, encoding="utf-8")
    assert main(["data", "train-tokenizer", "text.txt", "--vocab-size", "300", "--out", "tokenizer.json"]) == 0
    before = (folder / "tokenizer.json").read_bytes()
    for name in ("tokenizer.json", "."):
        words = ["data", "prepare", "text.txt", "--tokenizer", name, "--out", "tokenizer", "--overwrite"]
        assert main(words) == 2
        assert "tokenizer.json is an input too; name another --out" in capsys.readouterr().err
    assert (folder / "tokenizer.json").read_bytes() == before
