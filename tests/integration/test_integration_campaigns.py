"""The campaigns still run: a small part of each finds nothing wrong."""

from __future__ import annotations

import pytest

from tests.campaigns.__main__ import CAMPAIGNS, main

pytestmark = [pytest.mark.nightly, pytest.mark.multiproc, pytest.mark.timeout(900)]


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_a_small_share_of_a_campaign_keeps_every_promise(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", name, "--share", "0.005", "--jobs", "1"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert rows
    for row in rows:
        held, tried = row.split(" | ")[1].split(" of ")
        assert held == tried != "0"
