"""The offline bundle: packed from this checkout, installed without a network, over a PyTorch that stays as it is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.bundle.__main__ import BUILDING, NEVER, build_wheels, older, pinned, requirements, write_bundle
from tests.support.checkout import MEMBERS, ROOT

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def packed(folder: Path, python: str = HERE, left: Mapping[str, str] | None = None) -> Path:
    """A bundle without wheels, unpacked; ``left`` are the packages that the target was said to have."""
    (folder / "made" / "wheels").mkdir(parents=True)
    write_bundle(folder / "made", python, folder, left or {})
    return folder / "made"


def install(bundle: Path, target: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = (str(bundle / "install.sh"), str(target))
    inner = {**os.environ, "PYTHON": sys.executable, "PIP_NO_INDEX": "1", **variables}
    return subprocess.run(command, env=inner, capture_output=True, text=True, timeout=280, check=False)


def run_there(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # of xdist too
    inner = {**outer, "CUDA_VISIBLE_DEVICES": "", "PIP_NO_INDEX": "1"}
    return subprocess.run(command, cwd=folder, env=inner, capture_output=True, text=True, timeout=200, check=False)


def test_it_brings_all_that_is_required_but_torch() -> None:
    wanted = requirements()
    names = {each.partition(">")[0].partition("=")[0].partition("<")[0] for each in wanted}
    assert not names & {*NEVER, *(member.name for member in MEMBERS)}
    assert {"pydantic", "ruamel.yaml", "rich", "click", "pluggy", "tokenizers", *BUILDING} <= names
    assert pinned(["pytest"])[0].startswith("pytest==")


def test_wheels_of_an_older_glibc_run_on_a_newer_one() -> None:
    platforms = older("manylinux_2_28_x86_64")
    assert {"manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"} <= set(platforms)
    assert "manylinux_2_28_x86_64" not in platforms
    assert older("macosx_14_0_arm64") == []


def test_what_does_not_fit_ends_with_one_line(tmp_path: Path) -> None:
    bundle = packed(tmp_path)
    bare = tmp_path / "bare" / "python"
    bare.parent.mkdir()
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # without what is installed
    bare.chmod(0o755)
    said = {
        "has no PyTorch: install torch >= 2.9": install(bundle, tmp_path / "a", PYTHON=str(bare)),
        "there is no nobody: set PYTHON": install(bundle, tmp_path / "a", PYTHON="nobody"),
        "exists: name another folder": install(bundle, tmp_path),
    }
    (bundle / "requirements.txt").write_text("changed")
    said["files differ from SHA256SUMS"] = install(bundle, tmp_path / "a")
    for line, done in said.items():
        assert done.returncode == 1
        assert line in done.stderr
        assert done.stderr.count("install.sh: ") == 1
    assert not (tmp_path / "a").exists()


def test_packages_that_were_said_to_be_there_are_looked_for(tmp_path: Path) -> None:
    left = {"pluggy": version("pluggy"), "pytest": "", "packaging": "1.0", "nobody-has-it": "2.0", "nor-this": ""}
    bundle = packed(tmp_path, left=left)
    done = install(bundle, tmp_path / "a")
    assert done.returncode == 1
    found = f"packaging==1.0 ({version('packaging')} is) nobody-has-it nor-this"
    assert done.stderr == (
        f"install.sh: this bundle leaves out packages that are not here: {found}; "
        f"make it with HAVE=LIST, which here {sys.executable} -m pip list --format=freeze prints\n"
    )
    assert not (tmp_path / "a").exists()
    assert "pytest\n" in (bundle / "requirements.txt").read_text(), "any version will do"


def test_another_python_is_refused(tmp_path: Path) -> None:
    done = install(packed(tmp_path, "3.1"), tmp_path / "a")
    assert "is not Python 3.1, for which this bundle was made: set PYTHON" in done.stderr


@pytest.mark.nightly
@pytest.mark.timeout(290)
def test_it_installs_and_runs_where_only_ours_is_missing(tmp_path: Path) -> None:
    """Third parties' wheels are not downloaded here: those that are installed stand in for them."""
    from tests.support.scratch import Scratch

    behind = Scratch(tmp_path / "machine", ours=False)
    folder = tmp_path / "made"
    build_wheels(folder / "wheels")
    subprocess.run(
        (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder / "wheels"), "pip"), check=True
    )
    # In the place of Transformer Engine's a wheel of a package that the machine has, of the same version.
    subprocess.run(
        (
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "-w",
            str(folder / "te"),
            f"click=={version('click')}",
        ),
        check=True,
    )
    bundle = write_bundle(folder, HERE, tmp_path, {"pluggy": version("pluggy")})
    shutil.rmtree(folder)
    with tarfile.open(bundle) as archive:
        archive.extractall(tmp_path, filter="data")
    script = folder / "install.sh"
    lines = [line for line in script.read_text().splitlines() if "megatron-core" not in line and "einops" not in line]
    script.write_text("\n".join(lines) + "\n")
    sums = folder / "SHA256SUMS"
    sums.write_text("".join(f"{line}\n" for line in sums.read_text().splitlines() if "install.sh" not in line))
    done = install(folder, tmp_path / "a", PYTHON=str(behind.python))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a" / ".venv" / ".bundle").exists()
    (site,) = (tmp_path / "a" / ".venv" / "lib").glob("python*/site-packages")
    assert (site / "click").exists()
    assert (tmp_path / "a" / "Makefile").read_text() == (ROOT / "Makefile").read_text()
    ran = run_there(tmp_path / "a", ".venv/bin/megatron-run", "plugins", "list")
    assert "1f1b" in ran.stdout
    gpu = run_there(tmp_path / "a", "make", "gpu")  # installs nothing, finds every test, and skips them
    assert gpu.returncode == 0, gpu.stdout
    skipped = re.search(r"(\d+) skipped", gpu.stdout)
    assert skipped is not None
    assert int(skipped[1]) > 40
    assert "passed" not in gpu.stdout
