"""The release path: every distribution as a wheel, complete, and installable without anything else of ours."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.checkout import COMMAND_LINE, KERNEL, MEMBERS, PLANNER, ROOT, TESTING, Member, read_project
from tests.support.scratch import Scratch

pytestmark = pytest.mark.nightly

OFFLINE = ("--no-index", "--no-build-isolation", "--disable-pip-version-check", "-q")
VERSION = read_project(ROOT)["version"]
INTERLEAVED = next(member for member in MEMBERS if member.name.endswith("interleaved"))


def python(*arguments: str | Path, release: bool) -> None:
    """Run a Python module that builds something."""
    inner = {**os.environ, "MEGATRON_RUN_RELEASE": "1" if release else "0"}
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=inner,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def build(folder: Path, *sources: Path, release: bool) -> Path:
    """Build wheels of ``sources`` into ``folder``."""
    python("pip", "wheel", *OFFLINE, "--no-deps", "-w", folder, *sources, release=release)
    return folder


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the release wheels of the root and of every member."""
    return build(tmp_path_factory.mktemp("dist"), ROOT, *(member.folder for member in MEMBERS), release=True)


def wheel_of(folder: Path, name: str) -> zipfile.ZipFile:
    (file,) = folder.glob(f"{name.replace('-', '_')}-{VERSION}-*.whl")
    return zipfile.ZipFile(file)


def requires(wheel: zipfile.ZipFile) -> list[Requirement]:
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return [Requirement(line) for line in message_from_bytes(wheel.read(metadata)).get_all("Requires-Dist", [])]


@pytest.mark.parametrize("member", MEMBERS, ids=str)
def test_wheel_holds_its_sources_and_licence(wheels: Path, member: Member) -> None:
    names = set(wheel_of(wheels, member.name).namelist())
    information = {name for name in names if ".dist-info/" in name}
    assert names - information == member.files
    licences = {name.partition(".dist-info/")[2] for name in information if "/licenses/" in name}
    assert licences == {"licenses/LICENSE", "licenses/NOTICE"}


def test_kernel_wheel_holds_its_presets(wheels: Path) -> None:
    presets = [name for name in wheel_of(wheels, KERNEL.name).namelist() if "/presets/" in name]
    assert any(name.endswith(".yaml") for name in presets)


def test_released_root_asks_for_this_version_of_every_member(wheels: Path) -> None:
    wanted = requires(wheel_of(wheels, "megatron-run"))
    assert {str(one) for one in wanted} == {f"{member.name}=={VERSION}" for member in MEMBERS}


def test_root_of_a_checkout_asks_for_its_folders(tmp_path: Path) -> None:
    wanted = requires(wheel_of(build(tmp_path, ROOT, release=False), "megatron-run"))
    assert {one.name: one.url for one in wanted} == {member.name: member.folder.as_uri() for member in MEMBERS}


def test_released_source_distribution_builds_the_same_root(tmp_path: Path) -> None:
    python("hatchling", "build", "-t", "sdist", "-d", tmp_path, release=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    wanted = requires(wheel_of(build(tmp_path, archive, release=False), "megatron-run"))
    assert {str(one) for one in wanted} == {f"{member.name}=={VERSION}" for member in MEMBERS}


def test_released_wheels_install_and_run(wheels: Path, tmp_path: Path) -> None:
    scratch = Scratch(tmp_path / "env", ours=False)
    done = scratch.pip("install", "--no-index", "-q", "--find-links", wheels, f"megatron-run=={VERSION}")
    assert done.returncode == 0, done.stderr
    assert scratch.pip("check").returncode == 0
    where = scratch.run("-c", "import megatron_run; print(megatron_run.__file__)").stdout
    assert where.startswith(str(tmp_path))
    assert scratch.command("megatron-run", "--version").stdout.strip().endswith(VERSION)


def test_one_plugin_installs_alone_beside_the_kernel(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path / "env", ours=False)
    chosen = (KERNEL, PLANNER, TESTING, COMMAND_LINE, INTERLEAVED)
    done = scratch.pip("install", *OFFLINE, "-c", ROOT / "constraints.txt", *(member.folder for member in chosen))
    assert done.returncode == 0, done.stderr
    assert scratch.pip("check").returncode == 0
    listed = scratch.command("megatron-run", "plugins", "list")
    assert listed.returncode == 0, listed.stderr
    assert INTERLEAVED.name in listed.stdout
    others = {member.name for member in MEMBERS} - {member.name for member in chosen}
    assert not [name for name in others if name in listed.stdout]
