"""``megatron-run plan check``: text, JSON and refusals, and all of it without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_run_cli.main import main
from tests.support.checkout import ROOT

Output = pytest.CaptureFixture[str]

TABLE = str(ROOT / "tests/planner/tables/a100_multi.csv")
CHECK = ("plan", "check", TABLE, "--device", "a100")


def test_the_summary_and_the_worst_ten_are_shown(capsys: Output) -> None:
    assert main(CHECK) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("62 rows")
    errors = [abs(float(line.split()[-1].rstrip("%"))) for line in lines[lines.index("") + 3 :]]
    assert len(errors) == 10
    assert errors == sorted(errors, reverse=True)


def test_every_row_is_listed_when_asked(capsys: Output) -> None:
    assert main([*CHECK, "--rows"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 62 + 8


def test_json_holds_fractions_and_rows(capsys: Output) -> None:
    assert main([*CHECK, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in told["rows"]]
    assert told["mean_error"] == pytest.approx(sum(errors) / 62)
    assert 0 < told["regret_mean"] <= told["regret_max"] < 1
    assert -1 <= told["kendall"] <= 1


def test_recomputation_can_be_said(capsys: Output) -> None:
    assert main([*CHECK, "--json", "--recompute", "none"]) == 0
    none = json.loads(capsys.readouterr().out)
    assert {row["split"]["recompute"] for row in none["rows"]} == {"none"}
    assert none["mean_error"] > 0.15


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan", "check", "missing.csv", "--device", "a100"), "missing.csv"),
        (("plan", "check", TABLE, "--device", "a10"), "a100"),
        (("plan", "check", TABLE), "--device"),
    ],
)
def test_mistakes_are_refused_in_one_line(capsys: Output, words: tuple[str, ...], said: str) -> None:
    assert main(words) == 2
    told = capsys.readouterr()
    assert not told.out
    assert said in told.err
    assert len(told.err.splitlines()) == 1


def test_the_planner_loads_neither_torch_nor_numpy(tmp_path: Path) -> None:
    code = (
        "import sys; from megatron_run_cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(code or ('torch' in sys.modules) * 3 or ('numpy' in sys.modules) * 4)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *CHECK], capture_output=True, timeout=60, check=False, cwd=tmp_path
    )
    assert done.returncode == 0
