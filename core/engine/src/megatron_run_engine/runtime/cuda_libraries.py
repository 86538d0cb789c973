"""The files of CUDA's libraries that torch has loaded, and leading another package's loader to the same files.

A machine may hold several copies of one library: in pip's packages, with a CUDA toolkit, among the system's own, in
another environment. A process with two of them ends with undefined symbols or a crash. torch finds its copies beside
itself and loads them first, so they are the ones to use. A loader that searches by itself, such as that of Transformer
Engine, prefers a toolkit's and the system's, and knows only those pip packages that lie in its own environment.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

#: Libraries of which a process needs exactly one copy, by the middle of their file names: ``libcudnn.so.9``.
LIBRARIES = ("cudnn", "cublas", "nvrtc", "curand")
#: The variables by which Transformer Engine's loader is led, before it searches; cuBLAS it takes from the process.
#: Before release 2.11 it knows the first alone.
VARIABLES = {"cudnn": "CUDNN_HOME", "nvrtc": "NVRTC_HOME", "curand": "CURAND_HOME"}
#: What the kernel says this process has mapped. Only Linux has it, as only Linux has CUDA here.
MAPS = Path("/proc/self/maps")


def loaded_files(maps: Path = MAPS) -> dict[str, list[Path]]:
    """Library -> its files that this process has loaded, links resolved; more than one is a fault of the environment.

    A library that is not loaded is left out.
    """
    found: dict[str, list[Path]] = {}
    for line in maps.read_text(encoding="utf-8", errors="surrogateescape").splitlines() if maps.exists() else ():
        file = Path(line.split(maxsplit=5)[-1])  # address, rights, offset, device, inode, file
        name = file.name.partition(".so")[0].removeprefix("lib")
        if ".so" in file.name and name in LIBRARIES and file not in found.setdefault(name, []):
            found[name].append(file)
    return found


@contextmanager
def led_to_loaded() -> Iterator[None]:
    """Within: a loader of CUDA's libraries takes the files that torch has loaded, wherever they lie.

    Raises :class:`OSError` where a part of torch's cuDNN cannot be loaded.
    """
    _load_nvrtc()
    files = {name: each[0] for name, each in loaded_files().items()}
    if "cudnn" in files:
        _load_parts(files["cudnn"])
    with tempfile.TemporaryDirectory(prefix="megatron-run-") as folder, variables_kept(*VARIABLES.values()):
        os.environ.update(_homes(files, Path(folder)))
        yield


@contextmanager
def variables_kept(*names: str) -> Iterator[None]:
    """The variables ``names`` of the environment are afterwards as they were before."""
    before = dict(os.environ)
    try:
        yield
    finally:
        _restore({name: before.get(name) for name in names})


@contextmanager
def environment_kept() -> Iterator[None]:
    """All variables of the environment are afterwards as they were before."""
    before = dict(os.environ)
    try:
        yield
    finally:
        _restore({**dict.fromkeys(os.environ), **before})


def _restore(before: Mapping[str, str | None]) -> None:
    """Touch only what differs: threads of C libraries may read the environment at any time."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        elif os.environ.get(name) != value:
            os.environ[name] = value


def _homes(files: Mapping[str, Path], folder: Path) -> dict[str, str]:
    """A folder for each variable that holds one link, to the loaded file.

    The folder in which the file itself lies may hold other versions, and a whole system below it.
    """
    homes = {}
    for name in files.keys() & VARIABLES.keys():
        home = folder / name
        home.mkdir()
        (home / files[name].name).symlink_to(files[name])
        homes[VARIABLES[name]] = str(home)
    return homes


def _load_nvrtc() -> None:
    """Load NVRTC as torch does when it first compiles a kernel: by its own library, which says where NVRTC lies."""
    torch = find_spec("torch")
    if "nvrtc" not in loaded_files() and torch is not None and torch.origin is not None:
        with suppress(OSError):  # not in a torch for CPUs; without a driver it cannot be loaded
            ctypes.CDLL(str(Path(torch.origin).parent / "lib" / "libcaffe2_nvrtc.so"))


def _load_parts(cudnn: Path) -> None:
    """Load the other libraries of ``cudnn``, those of its own folder and version, before anybody searches for them.

    The linker takes a library that is loaded for one of that name. Otherwise it would search ``LD_LIBRARY_PATH`` and
    the system's folders, also for what one part needs of another: so those come first that others need.
    """
    version = cudnn.name.partition(".so")[2]
    parts = sorted(cudnn.parent.glob(f"libcudnn_*.so{version}"))
    first = [part for name in ("graph", "ops") for part in parts if part.name.startswith(f"libcudnn_{name}.")]
    for part in dict.fromkeys((*first, *parts)):
        ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)
