"""Writes ``requirements.lock``: what ``make`` installs, each package at its version and with the hash of its file.

    python -m tests.bundle.lock

Versions are those that pip resolves from ``constraints.txt``, ``requirements-dev.txt`` and what the members require, on
this machine. Hashes are the index's own, whatever other places pip is configured to take files from. torch is left out:
its builds for CPUs and for each CUDA have one version and other files. The lock holds for Linux on x86-64 with the
Python that made it; ``make setup LOCKED=1`` installs from it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from tests.support.checkout import MEMBERS, ROOT

LOCK = ROOT / "requirements.lock"
#: Has no file that is the same on every machine.
NEVER = "torch"
#: Builds the members.
BUILDING = ("editables", "hatchling")
_HEAD = f"""\
# Made by `make lock` for {{system}}, Python {{python}}. Without {NEVER}, which constraints.txt pins: its builds differ.
"""


def main() -> None:
    """Resolve, look the hashes up, and write the lock."""
    versions = resolved()
    LOCK.write_text(lock_text(hashes(versions)), encoding="utf-8")
    print(f"{LOCK.name}: {len(versions)} packages")  # noqa: T201  # a command


def asked() -> list[str]:
    """What the members require beside each other."""
    ours = {member.name for member in MEMBERS}
    found = {str(text) for member in MEMBERS for text in member.project.get("dependencies", ())}
    return sorted(text for text in found if Requirement(text).name not in ours)


def resolved() -> Mapping[str, str]:
    """The version of each package that pip would install anew here."""
    words = ["-c", "constraints.txt", "-r", "requirements-dev.txt", *BUILDING, *asked()]
    return {_name(each): each["version"] for each in _reported(words) if _name(each) != NEVER}


def hashes(versions: Mapping[str, str]) -> Mapping[str, tuple[str, str]]:
    """The version and SHA-256 of each package: of the index's file for this machine, which is not downloaded."""
    trust = ["--cert", os.environ["PIP_CERT"]] if "PIP_CERT" in os.environ else []
    words = ["--isolated", *trust, "--no-deps", *(f"{name}=={version}" for name, version in versions.items())]
    found = _reported(words, "download_info")
    return {_name(each): (each["version"], each["archive_info"]["hashes"]["sha256"]) for each in found}


def lock_text(found: Mapping[str, tuple[str, str]]) -> str:
    """The file, sorted by name."""
    system, python = f"{platform.system()} on {platform.machine()}", ".".join(platform.python_version_tuple()[:2])
    lines = [f"{name}=={version} --hash=sha256:{digest}" for name, (version, digest) in sorted(found.items())]
    return _HEAD.format(system=system, python=python) + "\n".join(lines) + "\n"


def _reported(words: Sequence[str], part: str = "") -> list[dict[str, Any]]:
    """What ``pip install --dry-run`` with ``words`` reports of each package: its metadata, and ``part`` with it."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed", "--report", str(report)]
        subprocess.run([*pip, *words], check=True, cwd=ROOT)
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return [{**each["metadata"], **each.get(part, {})} for each in found]


def _name(package: Mapping[str, Any]) -> str:
    return re.sub(r"[-_.]+", "-", str(package["name"])).lower()


if __name__ == "__main__":
    main()
