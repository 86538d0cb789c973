"""The local launcher ends a run whose ranks stand still, and names the one that holds up the others."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from megatron_run.errors import ExitCode
from tests.support.launcher import Launcher, no_process_left

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(60)]
#: Seconds after which a rank that says nothing new hangs.
LIMIT = 1.0


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path)


@pytest.mark.parametrize(("state", "what"), [("hang", "hangs"), ("stop", "is stopped by a signal (SIGSTOP)")])
def test_a_rank_that_does_not_come_is_named_with_its_place_and_what_the_other_waits_in(
    launcher: Launcher, state: str, what: str
) -> None:
    ending = launcher("0:page wait", f"1:page {state}", timeout=LIMIT)
    assert ending.code == ExitCode.RANK_LOST
    silence = "nothing new for TIME s in backward B0.0 of step 3"
    waits = "rank 0 waits for it in all-reduce of 8 values, number 1 over world, in optimizer of step 3"
    advice = "see the log of that rank, or raise run.timeout if it is only slow"
    text = re.sub(r"for \d\.\d s", "for TIME s", ending.message)
    assert text == f"rank 1 {what}: {silence}, {waits}; {advice} (log: {launcher.folder.log(1)})"
    assert no_process_left(launcher)


def test_a_slow_step_is_no_alarm_for_those_who_wait_for_it(launcher: Launcher) -> None:
    """Rank 1 goes on for three times the limit; then it leaves rank 0, which waits for it, alone."""
    start = time.monotonic()
    ending = launcher("0:page wait", "1:page slow", timeout=LIMIT)
    assert time.monotonic() - start > 3.0
    assert ending.message.startswith("rank 1 has ended without the others: ")


def test_a_killed_rank_is_named_with_what_it_was_doing(launcher: Launcher) -> None:
    ending = launcher("0:page hang", "1:page kill", timeout=30.0, grace=0.2)
    expected = f"a rank was killed by SIGKILL in backward B0.0 of step 3 (rank 1, log: {launcher.folder.log(1)})"
    assert (ending.code, ending.message) == (ExitCode.RANK_LOST, expected)


def test_ranks_that_say_nothing_at_all_are_not_judged(launcher: Launcher) -> None:
    assert launcher("*:talk", timeout=0.2).code == ExitCode.DONE
