"""``requirements.lock`` is complete: what is required is in it, at an allowed version and with a hash."""

from __future__ import annotations

import re

from packaging.requirements import Requirement

from tests.bundle import lock
from tests.support.checkout import ROOT

ROW = re.compile(r"([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}")


def rows() -> dict[str, str]:
    """The version of each package."""
    lines = [line for line in lock.LOCK.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    matches = [ROW.fullmatch(line) for line in lines]
    assert all(matches), "each row is one package with its version and one hash, and no address"
    found = {match[1]: match[2] for match in matches if match}
    assert list(found) == sorted(found)
    assert len(found) == len(lines)
    return found


def test_what_is_required_is_locked_at_a_version_that_is_allowed() -> None:
    locked = rows()
    pinned = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
    wanted = [line.partition("#")[0] for line in pinned if line.partition("#")[0].strip()]
    for text in (*wanted, *lock.asked(), *lock.BUILDING):
        asked = Requirement(text)
        name = re.sub(r"[-_.]+", "-", asked.name).lower()
        if name != lock.NEVER:
            assert asked.specifier.contains(locked[name], prereleases=True), text


def test_torch_is_not_locked_since_its_builds_differ() -> None:
    assert not {name for name in rows() if name == lock.NEVER or name.startswith("nvidia-")}
    assert "torch==" in (ROOT / "constraints.txt").read_text(encoding="utf-8")
