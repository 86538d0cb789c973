"""A trial plants one fault in a copy, says what its tests made of it, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.catalogue import Mutant
from tests.mutants.trial import Workshop
from tests.support.processes import alive, wait_until

pytestmark = pytest.mark.nightly
SOURCE = "def double(x):\n    return 2 * x\n\n\ndef unused():\n    return 1\n"
#: What the mutant does is seen in a child process too, which a test that hangs leaves running.
TESTS = """
import subprocess, sys
from pathlib import Path

def test_here():
    import tiny
    assert tiny.double(2) != 5

def test_in_a_child():
    program = "import os, tiny, time; open('child', 'w').write(str(os.getpid())); time.sleep(60 * (tiny.double(3) < 0))"
    subprocess.run([sys.executable, "-c", program], start_new_session=True, check=True)

def test_broken():
    assert False
"""


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    package, tests = tmp_path / "origin" / "core" / "src", tmp_path / "origin" / "tests"
    package.mkdir(parents=True)
    tests.mkdir()
    (package / "tiny.py").write_text(SOURCE)
    (tests / "test_tiny.py").write_text(TESTS)
    (tmp_path / "copy").mkdir()
    return Workshop(tmp_path / "origin", tmp_path / "copy", limit=10.0)


def mutant(find: str, put: str, words: str) -> Mutant:
    return Mutant("tiny", "it", "tiny", find, put, (f"tests/test_tiny.py {words}",))


def test_a_fault_that_a_test_notices_is_killed_by_name_and_put_back(workshop: Workshop) -> None:
    result = workshop.try_out(mutant("2 * x", "2 * x + 1", "not broken"))
    assert (result.outcome, result.by) == ("killed", "tests/test_tiny.py::test_here")
    assert (workshop.root / "core" / "src" / "tiny.py").read_text() == SOURCE
    assert (workshop.origin / "core" / "src" / "tiny.py").read_text() == SOURCE


def test_a_fault_that_no_test_notices_survives(workshop: Workshop) -> None:
    assert workshop.try_out(mutant("return 1", "return 2", "not broken")).outcome == "survived"


def test_tests_that_fail_without_the_fault_kill_nothing(workshop: Workshop) -> None:
    result = workshop.try_out(mutant("return 1", "return 2", "broken"))
    assert result[:2] == ("no answer", "tests fail without the mutant")


def test_where_no_test_is_chosen_there_is_no_answer(workshop: Workshop) -> None:
    assert workshop.try_out(mutant("return 1", "return 2", "absent"))[:2] == ("no answer", "no test was chosen")


def test_a_fault_that_hangs_has_no_answer_and_what_it_started_is_ended(workshop: Workshop) -> None:
    workshop.limit = 6.0
    result = workshop.try_out(mutant("2 * x", "-2 * x", "child"))
    assert result[:2] == ("no answer", "no end within 6 s")
    child = int((workshop.root / "child").read_text())
    wait_until(lambda: not alive(child), 5.0)
