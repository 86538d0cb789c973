"""The campaigns still run: a small part of each finds nothing wrong."""

from __future__ import annotations

import pytest

from tests.campaigns.__main__ import main

pytestmark = [pytest.mark.nightly, pytest.mark.multiproc, pytest.mark.timeout(120)]


#: Those that take seconds; `make campaigns` does all.
QUICK = ("crash-points", "flips", "malformed", "folders")


def test_a_small_share_of_the_quick_campaigns_keeps_every_promise(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", *QUICK, "--share", "0.005", "--jobs", "1"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= len(QUICK)
    for row in rows:
        held, tried = row.split(" | ")[1].split(" of ")
        assert held == tried != "0"
