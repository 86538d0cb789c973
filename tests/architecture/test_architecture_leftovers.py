"""The guard against processes left behind finds what it should."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.leftovers import PROCESSES, end_leftovers, marked_processes

#: Starts a grandchild and ends at once, so that the grandchild is an orphan.
ORPHAN = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"

pytestmark = pytest.mark.skipif(not PROCESSES.is_dir(), reason="processes are looked up in /proc")


def test_an_orphan_is_found_named_and_ended() -> None:
    inner = {**os.environ, "TESTED_BY": "the-orphan-test"}
    subprocess.run([sys.executable, "-c", ORPHAN], env=inner, check=True, timeout=30)
    (described,) = end_leftovers("TESTED_BY=the-orphan-test", patience=0.1).values()
    assert "time.sleep(60)" in described
    assert "test_an_orphan_is_found" in described
    deadline = time.monotonic() + 5
    while marked_processes("TESTED_BY=the-orphan-test") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not marked_processes("TESTED_BY=the-orphan-test")


def test_nothing_is_found_when_all_ended(tmp_path: Path) -> None:
    inner = {**os.environ, "TESTED_BY": "the-quiet-test"}
    subprocess.run([sys.executable, "-c", ""], env=inner, check=True, timeout=30, cwd=tmp_path)
    assert not end_leftovers("TESTED_BY=the-quiet-test", patience=0)
