"""Makes an offline bundle: all that a machine with Python and PyTorch, and without a network, needs to run and test.

    python -m tests.bundle [--python 3.12] [--platform manylinux_2_28_x86_64] [--te WHEEL --arch 90] [--have LIST]

``install.sh`` in it says how it is installed. It holds our wheels, the wheels that they need but torch, this checkout
with its tests and benchmarks, and checksums of everything. With ``--te`` it brings Transformer Engine for one GPU
architecture: ``WHEEL`` is its part for PyTorch, which ``make te-env`` compiles; the rest is downloaded. ``LIST`` names
what the target has, as ``pip list --format=freeze`` prints it there, and is left out.
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
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from tests.bundle.fatbin import FatbinError
from tests.bundle.wheels import leave_out, narrow_wheel, read_had
from tests.support.checkout import MEMBERS, ROOT, kept_files, read_project

HERE = Path(__file__).parent
VERSION = read_project(ROOT)["version"]
MIB = 2**20
#: Largest bundle without Transformer Engine, and with it.
LARGEST, LARGEST_TE = 64 * MIB, 60 * MIB
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
#: The library of the second, which has the code for all architectures.
TE_LIBRARY = "transformer_engine/wheel_lib/libtransformer_engine.so"
#: What its import needs that nothing else of ours does.
TE_NEEDS = ("einops",)
#: Brought even where the target has it: it installs the others.
ALWAYS = ("pip",)
#: What a target of Transformer Engine has, unless a list of its own says otherwise.
GPU_MACHINE = HERE / "gpu_machine.txt"


def main(words: Sequence[str] | None = None) -> None:
    """Make the bundle that the command line describes, and print its files with their sizes."""
    parser = argparse.ArgumentParser(prog="python -m tests.bundle", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--python", default="3.12", metavar="VERSION")
    parser.add_argument("--platform", default="manylinux_2_28_x86_64")
    parser.add_argument("--te", type=Path, metavar="WHEEL", help="the compiled transformer-engine-torch")
    parser.add_argument("--arch", type=int, default=90, metavar="90", help="the GPU architecture it is for")
    parser.add_argument("--have", type=Path, metavar="LIST", help="packages that the target has")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    given = parser.parse_args(words)
    given.out.mkdir(parents=True, exist_ok=True)
    name = f"megatron-run-{VERSION}-py{given.python}-{given.platform}{f'-te-sm{given.arch}' if given.te else ''}"
    had = had_there(given.have or (GPU_MACHINE if given.te else None))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / name
        wheels = folder / "wheels"
        build_wheels(wheels)
        target = Target(given.python, given.platform)
        target.download(wheels, requirements(), dependencies=True)
        target.download(wheels, pinned(PEERS), dependencies=False)
        if given.te:
            bring_engine(target, given.te, given.arch, folder)
        left = leave_out(wheels, had, requirements(), ALWAYS)
        made = write_bundle(folder, given.python, given.out, left)
    size, largest = made.stat().st_size, LARGEST_TE if given.te else LARGEST
    print(f"{size / MIB:6.1f} MiB  {made}, without {len(left)} packages that the target has")  # noqa: T201  # a command
    if size > largest:
        raise SystemExit(
            f"{made} is larger than {largest // MIB} MiB: leave out what the target has with HAVE=LIST, which there "
            "python3 -m pip list --format=freeze prints"
        )


def had_there(file: Path | None) -> dict[str, str]:
    """Names and versions in the list ``file``; none without a file. Another file ends the command."""
    if file is None:
        return {}
    try:
        return read_had(file.read_text("utf-8"))
    except (OSError, InvalidRequirement) as error:
        raise SystemExit(
            f"{file} is no list of packages, as python3 -m pip list --format=freeze prints: {error}"
        ) from None


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
    """Requirements of our distributions, their tests and their builds, as pip takes them."""
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


def bring_engine(target: Target, compiled: Path, architecture: int, folder: Path) -> None:
    """Transformer Engine for one architecture in the folder ``te``, and beside our wheels what it needs."""
    wheels = folder / "te"
    version = compiled.name.split("-")[1]
    target.download(wheels, [f"{name}=={version}" for name in TE], dependencies=False)
    target.download(folder / "wheels", TE_NEEDS, dependencies=False)
    shutil.copy(compiled, wheels)
    (large,) = wheels.glob("transformer_engine_cu*.whl")
    try:
        narrow_wheel(large, TE_LIBRARY, architecture)
    except FatbinError as error:
        raise SystemExit(f"Transformer Engine {version} cannot be brought for ARCH={architecture}: {error}") from None


def write_bundle(folder: Path, python: str, out: Path, left: Mapping[str, str]) -> Path:
    """Pack ``folder``, which holds the wheels, with the checkout, ``install.sh`` and checksums.

    ``left`` are the packages that the target has, which ``install.sh`` looks for there.
    """
    pack_checkout(folder / "checkout.tar.gz")
    ours = [f"{member.name}=={VERSION}" for member in BROUGHT]
    required = [Requirement(line) for line in pinned((*TESTING, *PEERS))]
    lines = [*ours, *(one.name if one.name in left else str(one) for one in required)]
    (folder / "requirements.txt").write_text("\n".join((*lines, "")), "utf-8")
    (folder / "have.txt").write_text("".join(f"{name} {version}\n" for name, version in left.items()), "utf-8")
    script = (HERE / "install.sh").read_text("utf-8").replace("@PYTHON@", python)
    (folder / "install.sh").write_text(script, "utf-8")
    (folder / "install.sh").chmod(0o755)
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
