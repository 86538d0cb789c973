"""``config schema --write``, and the first line of YAML files by which editors find the schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_run.config.yaml import parse
from megatron_run_cli.editor_schema import SCHEMA, schema_line
from megatron_run_cli.main import main

Output = pytest.CaptureFixture[str]
PLAN = ["plan", "preset:tiny", "--gpus", "2", "--write"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    return tmp_path


def test_the_schema_is_written_and_the_line_told(capsys: Output) -> None:
    assert main(["config", "schema", "--write"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"# yaml-language-server: $schema={SCHEMA}"
    assert main(["config", "schema"]) == 0
    assert json.loads(Path(SCHEMA).read_text()) == json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("place", "file", "named"),
    [(".", "best.yaml", SCHEMA), (".", "configs/best.yaml", f"../{SCHEMA}"), ("configs", "configs/best.yaml", SCHEMA)],
)
def test_what_plan_writes_names_the_schema(place: str, file: str, named: str, folder: Path) -> None:
    (folder / place / SCHEMA).touch()
    assert main([*PLAN, file]) == 0
    text = Path(file).read_text()
    assert text.splitlines()[0] == f"# yaml-language-server: $schema={named}"
    assert parse(text, file)["version"].data == 1


def test_a_translated_script_names_the_schema(capsys: Output) -> None:
    Path(SCHEMA).touch()
    Path("train.sh").write_text("torchrun pretrain_gpt.py --num-layers 2 --hidden-size 32 --num-attention-heads 2\n")
    main(["config", "from-megatron", "train.sh"])
    assert capsys.readouterr().out.startswith(f"# yaml-language-server: $schema={SCHEMA}\n#")


def test_no_file_names_a_schema_that_is_missing() -> None:
    """An editor would complain of every file."""
    assert main([*PLAN, "best.yaml"]) == 0
    assert "$schema" not in Path("best.yaml").read_text()
    assert schema_line(Path("configs")) == ""
