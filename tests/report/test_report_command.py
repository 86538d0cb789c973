"""``megatron-run report``: what it writes, prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_run.errors import ExitCode
from megatron_run_cli.main import main
from tests.support.run_folders import make_run

Output = pytest.CaptureFixture[str]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two runs that differ in the rate, in which the command runs."""
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "one")
    make_run(tmp_path / "runs" / "two", lr=3e-3)
    return tmp_path


def refused(capsys: Output, *words: str) -> str:
    assert main(["report", *words]) == ExitCode.INPUT
    said = capsys.readouterr()
    assert not said.out
    return said.err.removeprefix("megatron-run: ").rstrip()


@pytest.mark.usefixtures("runs")
def test_a_page_is_written_and_an_earlier_one_replaced_but_nothing_else(capsys: Output) -> None:
    for names in (["runs/one"], ["runs/one", "runs/two"]):
        assert main(["report", *names]) == 0
        assert capsys.readouterr().out == "written: report.html\n"
        assert Path("report.html").read_text().startswith("<!doctype html>")
    Path("report.html").write_text("mine")
    assert refused(capsys, "runs/one") == "report.html exists; name another --output, or add --overwrite"
    assert Path("report.html").read_text() == "mine"
    assert main(["report", "runs/one", "--overwrite"]) == 0
    assert "Training loss" in Path("report.html").read_text()


@pytest.mark.usefixtures("runs")
def test_no_file_of_a_run_becomes_a_report(capsys: Output) -> None:
    before = Path("runs/one/metrics.jsonl").read_text()
    Path("runs/one/checkpoints/step4").mkdir(parents=True)
    Path("runs/one/checkpoints/step4/manifest.json").write_text("{}")
    for name in ("metrics.jsonl", "checkpoints/step4/manifest.json"):
        said = refused(capsys, "runs/one", "--output", f"runs/one/{name}", "--overwrite")
        assert said == f"runs/one/{name} is a file of the run; name another --output"
    assert Path("runs/one/metrics.jsonl").read_text() == before
    for _ in range(2):
        assert main(["report", "runs/one", "--output", "runs/one/page.html"]) == 0


@pytest.mark.usefixtures("runs")
def test_the_table_has_a_row_for_each_run_and_what_differs(capsys: Output) -> None:
    Path("runs/latest").symlink_to("two")
    assert main(["report", "--text", "runs/one", "runs/two", "runs/latest"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "run  state     step  loss    best    at  tokens/s  s/step  peak GiB  ranks  time",
        "one  finished  8     0.5000  1.2500  8   512       1       0.5       2      7 s",
        "two  finished  8     0.5000  1.2500  8   512       1       0.5       2      7 s",
        "",
        "differs   one    two",
        "train.lr  0.001  0.003",
    ]
    assert not Path("report.html").exists()


@pytest.mark.usefixtures("runs")
def test_json_has_the_same_numbers(capsys: Output) -> None:
    assert main(["report", "--json", "runs/one", "runs/two"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["run"] for each in found["runs"]] == ["one", "two"]
    assert found["runs"][0] | {"folder": ""} == {
        "run": "one", "folder": "", "state": "finished", "step": 8, "steps": 8, "loss": 0.5, "best_loss": 1.25,
        "best_step": 8, "tokens": 4096.0, "tokens_per_s": 512.0, "step_s": 1.0, "peak_gib": 0.5, "mfu": 0.25,
        "skipped": 0, "ranks": 2, "attempts": 1, "seconds": 7.0,
    }  # fmt: skip
    assert found["differences"] == {"train.lr": ["0.001", "0.003"]}


@pytest.mark.usefixtures("runs")
def test_without_a_name_it_is_the_latest_run(capsys: Output) -> None:
    make_run(Path("runs/20260102-030405-abcd"))
    Path("runs/latest").write_text("20260102-030405-abcd\n")
    assert main(["report", "--output", "runs/latest/page.html"]) == 0
    assert capsys.readouterr().out == "written: runs/20260102-030405-abcd/page.html\n"
    assert main(["report", "--text"]) == 0
    assert "20260102-030405-abcd  finished" in capsys.readouterr().out


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("runs/ome", "there is no run in runs/ome: there is no such folder; did you mean 'one'?"),
        ("runs", "there is no run in runs: it has no run.json; name a run folder, as runs/first"),
        (
            "runs/one runs/two other",
            "there is no run in other: there is no such folder; name a run folder, as runs/first",
        ),
        (
            "runs/one --output no/page.html",
            "no/page.html cannot be written: its folder does not exist; name another --output",
        ),
    ],
)
def test_a_mistake_is_one_line(words: str, line: str, capsys: Output) -> None:
    assert refused(capsys, *words.split()) == line


@pytest.mark.usefixtures("runs")
def test_more_than_two_runs_are_a_table(capsys: Output) -> None:
    make_run(Path("runs/three"))
    assert refused(capsys, "runs/one", "runs/two", "runs/three") == "a page holds 2 runs: 3 are named; add --text"


@pytest.mark.usefixtures("runs")
def test_a_sweep_among_runs_stands_for_its_runs_and_what_is_no_run_is_told(capsys: Output) -> None:
    """As the shell makes them of ``runs/*``: a table of all that has begun, whatever else lies there."""
    make_run(Path("runs/sweep/run-000"))
    make_run(Path("runs/sweep/run-001"), lr=3e-3)
    for folder in ("runs/imported/gpt2", "runs/sweep/run-002", "runs/empty"):
        Path(folder).mkdir(parents=True)
    for sweep in ("runs/sweep", "runs/empty"):
        Path(sweep, "sweep.json").write_text("{}")
    Path("runs/notes.txt").write_text("mine")
    Path("runs/latest").write_text("20260102-030405-abcd\n")  # a run that was removed
    assert main(["report", "--text", *map(str, sorted(Path("runs").iterdir()))]) == 0
    said = capsys.readouterr()
    rows = said.out.partition("\n\n")[0].splitlines()
    assert [row.split()[0] for row in rows] == ["run", "one", "sweep/run-000", "sweep/run-001", "two"]
    assert [line.removeprefix("megatron-run: left out: ") for line in said.err.splitlines()] == [
        "runs/empty is a sweep: none of its runs has begun",
        "there is no run in runs/imported: it has no run.json",
        "there is no run in runs/latest: there is no such folder",
        "there is no run in runs/notes.txt: it is a file",
        "there is no run in runs/sweep/run-002: it has no run.json",
    ]


@pytest.mark.usefixtures("runs")
def test_a_sweep_that_has_not_begun_has_no_report(capsys: Output) -> None:
    Path("runs/sweep").mkdir()
    Path("runs/sweep/sweep.json").write_text("{}")
    assert refused(capsys, "runs/sweep") == (
        "runs/sweep is a sweep: none of its runs has begun; type: megatron-run sweep --table --folder runs/sweep"
    )
