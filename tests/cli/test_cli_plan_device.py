"""The device for which ``plan`` has planned where nobody names one, its unit, and a step of the latest run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_run.files.latest_run import point_latest_at
from megatron_run_cli.main import main

Output = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    "words", ["--size 1.3B --gpus 8 --as-is", "schedule preset:tiny --set parallel.pipeline=2 --effort 0.02"]
)
def test_a_device_that_nobody_named_is_told_and_memory_has_its_unit(words: str, capsys: Output) -> None:
    assert main(["plan", *words.split()]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("megatron-run: planned for A100 80 GB, as no --device is named; ")
    head, *rows = (line for line in out.splitlines() if line[:9].strip() == "step" or line[7:9] == "s ")
    end = head.index("memory") + len("memory")
    assert {row[end - 4 : end] for row in rows} == {" GiB"}
    assert main(["plan", *words.split(), "--device", "h100"]) == 0
    assert capsys.readouterr().err == ""


def test_a_step_of_the_latest_run_joins_the_timeline(
    capsys: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "20260102-030405-abcd"
    run.mkdir(parents=True)
    (run / "step-2.json").write_text('{"traceEvents": []}')
    point_latest_at(run)
    words = "preset:tiny --gpus 1 --device a100 --as-is --timeline x.json --beside runs/latest/step-2.json"
    assert main(["plan", *words.split()]) == 0, capsys.readouterr().err
    assert json.loads((tmp_path / "x.json").read_text())["traceEvents"]
