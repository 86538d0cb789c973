"""Makes an offline bundle: all that a machine with Python and PyTorch, and without a network, needs to run and test.

    python -m tests.bundle [--python 3.12] [--platform manylinux_2_28_x86_64] [--te WHEEL] [--out dist]

``install.sh`` in it says how it is installed. It holds our wheels, the wheels that they need but torch, this checkout
with its tests and benchmarks, and checksums of everything. With ``--te`` a second archive, in parts, brings Transformer
Engine: ``WHEEL`` is its part for PyTorch, which ``make te-env`` compiles; the rest is downloaded.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path

from packaging.requirements import Requirement

from tests.support.checkout import MEMBERS, ROOT, kept_files, read_project

HERE = Path(__file__).parent
VERSION = read_project(ROOT)["version"]
MIB = 2**20
#: Largest bundle without Transformer Engine, and largest part of the archive that brings it.
LARGEST, PART = 64 * MIB, 60 * MIB
#: Of the tests' requirements those that tests on a GPU import.
TESTING = ("pytest", "pytest-timeout", "pytest-xdist", "safetensors")
#: What builds and installs packages, ours among them: tests write and install plugins.
BUILDING = ("editables", "hatchling", "pip")
#: A peer of the benchmarks, without what it requires: torch, numpy and packaging are there.
PEERS = ("megatron-core",)
#: Ours that report to a service on the network, with libraries as large as all the others.
LEFT_OUT = ("megatron-run-observer-mlflow", "megatron-run-observer-wandb")
BROUGHT = tuple(member for member in MEMBERS if member.name not in LEFT_OUT)
#: Never brought: the machine has it, for its own GPU.
NEVER = ("torch",)
TE = ("transformer-engine", "transformer-engine-cu13")


def main(words: Sequence[str] | None = None) -> None:
    """Make the bundle that the command line describes, and print its files with their sizes."""
    parser = argparse.ArgumentParser(prog="python -m tests.bundle", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--python", default="3.12", metavar="VERSION")
    parser.add_argument("--platform", default="manylinux_2_28_x86_64")
    parser.add_argument("--te", type=Path, metavar="WHEEL", help="the compiled transformer-engine-torch")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    given = parser.parse_args(words)
    given.out.mkdir(parents=True, exist_ok=True)
    name = f"megatron-run-{VERSION}-py{given.python}-{given.platform}"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / name
        wheels = folder / "wheels"
        build_wheels(wheels)
        target = Target(given.python, given.platform)
        target.download(wheels, requirements(), dependencies=True)
        target.download(wheels, pinned(PEERS), dependencies=False)
        parts = engine_parts(target, given.te, folder.parent, given.out / name) if given.te else []
        made = [write_bundle(folder, given.python, given.out, parts), *parts]
    for file in made:
        print(f"{file.stat().st_size / MIB:6.1f} MiB  {file}")  # noqa: T201  # a command
    if made[0].stat().st_size > LARGEST:
        raise SystemExit(f"{made[0]} is larger than {LARGEST // MIB} MiB")


class Target:
    """The Python and the platform that wheels are downloaded for."""

    def __init__(self, python: str, platform: str) -> None:
        self._options = ["--only-binary", ":all:", "--python-version", python, "--implementation", "cp"]
        for each in (platform, *older(platform)):
            self._options += ["--platform", each]

    def download(self, folder: Path, wanted: Iterable[str], *, dependencies: bool) -> None:
        """Download wheels of ``wanted`` into ``folder``, and of what they require if ``dependencies``."""
        alone = () if dependencies else ("--no-deps",)
        pip("download", *alone, *self._options, "-d", str(folder), *wanted)


def older(platform: str) -> list[str]:
    """The platforms of older wheels that run on ``platform``: ``manylinux_2_28_x86_64`` runs those of glibc 2.27."""
    match = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", platform)
    if match is None:
        return []
    minor, machine = int(match[1]), match[2]
    named = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
    below = [f"manylinux_2_{each}_{machine}" for each in range(minor - 1, 4, -1)]
    return [*below, *(f"{name}_{machine}" for least, name in named.items() if least <= minor)]


def requirements() -> list[str]:
    """What our distributions, their tests and their builds require of others, as pip takes it."""
    ours = {member.name for member in MEMBERS}
    asked = (Requirement(line) for member in BROUGHT for line in member.project.get("dependencies", ()))
    needed = {str(one) for one in asked if one.name not in ours and one.name not in NEVER}
    return [*sorted(needed), *pinned(TESTING), *BUILDING]


def pinned(names: Iterable[str]) -> list[str]:
    """The lines of ``requirements-dev.txt`` for ``names``."""
    lines = (ROOT / "requirements-dev.txt").read_text("utf-8").splitlines()
    asked = [Requirement(line.partition("#")[0]) for line in lines if line and not line.startswith("#")]
    return [f"{one.name}{one.specifier}" for one in asked if one.name in names]


def build_wheels(folder: Path) -> None:
    """Build the distributions of this checkout, as a release would publish them."""
    sources = [str(member.folder) for member in BROUGHT]
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), *sources, MEGATRON_RUN_RELEASE="1")


def engine_parts(target: Target, compiled: Path, scratch: Path, stem: Path) -> list[Path]:
    """Transformer Engine in an archive beside the bundle, in parts."""
    wheels = scratch / "te"
    version = compiled.name.split("-")[1]
    target.download(wheels, [f"{name}=={version}" for name in TE], dependencies=False)
    shutil.copy(compiled, wheels)
    packed = scratch / "te.tar"
    with tarfile.open(packed, "w") as archive:
        for file in sorted(wheels.iterdir()):
            archive.add(file, f"wheels/{file.name}")
    parts: list[Path] = []
    with packed.open("rb") as whole:
        while data := whole.read(PART):
            parts.append(stem.with_name(f"{stem.name}.te.{len(parts):02d}"))
            parts[-1].write_bytes(data)
    return parts


def write_bundle(folder: Path, python: str, out: Path, parts: Sequence[Path]) -> Path:
    """Pack ``folder``, which holds the wheels, with the checkout, ``install.sh`` and checksums."""
    pack_checkout(folder / "checkout.tar.gz")
    ours = (f"{member.name}=={VERSION}" for member in BROUGHT)
    (folder / "requirements.txt").write_text("\n".join((*ours, *pinned((*TESTING, *PEERS)), "")), "utf-8")
    script = (HERE / "install.sh").read_text("utf-8").replace("@PYTHON@", python)
    (folder / "install.sh").write_text(script, "utf-8")
    (folder / "install.sh").chmod(0o755)
    if parts:
        (folder / "TE_SHA256SUMS").write_text("".join(f"{digest(part)}  {part.name}\n" for part in parts), "utf-8")
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    sums = "".join(f"{digest(file)}  {file.relative_to(folder)}\n" for file in files)
    (folder / "SHA256SUMS").write_text(sums, "utf-8")
    packed = out / f"{folder.name}.tar"
    with tarfile.open(packed, "w") as archive:
        archive.add(folder, folder.name)
    return packed


def pack_checkout(file: Path) -> None:
    """Everything that git keeps of this checkout, as it lies on the disk."""
    with tarfile.open(file, "w:gz") as archive:
        for source in kept_files():
            archive.add(source, source.relative_to(ROOT))
        revision = subprocess.run(
            ("git", "describe", "--always", "--dirty"), cwd=ROOT, capture_output=True, check=True
        ).stdout
        named = tarfile.TarInfo("REVISION")  # there is no repository where it is unpacked
        named.size = len(revision)
        archive.addfile(named, io.BytesIO(revision))


def digest(file: Path) -> str:
    """SHA-256, in hexadecimal."""
    return sha256(file.read_bytes()).hexdigest()


def pip(*words: str, **variables: str) -> None:
    """Run pip. Raises :class:`SystemExit` with what it said when it fails."""
    command = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *words)
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"pip {words[0]}: {done.stderr.strip()}")


if __name__ == "__main__":
    main()
