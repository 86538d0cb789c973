"""Transformer Engine's loader takes the copies of CUDA's libraries that torch has loaded, wherever others lie.

The libraries are compiled here; processes of their own load them, since the linker reads its paths when one starts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_run_engine.runtime.cuda_libraries import (
    VARIABLES,
    environment_kept,
    led_to_loaded,
    loaded_files,
    variables_kept,
)
from megatron_run_engine.runtime.transformer_engine import import_led
from tests.support.cuda_copies import Copies, make_engine, make_torch

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="libraries are compiled for Linux"
)

PROGRAM = """
import json, os, sys
import torch
from megatron_run_engine.runtime.cuda_libraries import loaded_files
from megatron_run_engine.runtime.transformer_engine import import_led
before = dict(os.environ)
if sys.argv[1] == "led":
    import_led("transformer_engine.pytorch")
else:
    import transformer_engine.pytorch
assert dict(os.environ) == before
print(json.dumps(loaded_files(), default=str))
"""
#: The folders to import from, variables besides, and the copy that torch loads.
Layout = tuple[list[Path], dict[str, str], Copies]


def pip_copies(site: Path) -> Copies:
    return Copies(site / "nvidia" / "cudnn" / "lib", site / "nvidia" / "cu13" / "lib").make()


def one_environment(folder: Path) -> Layout:
    copies = pip_copies(folder / "site")
    make_torch(folder / "site", copies)
    make_engine(folder / "site", copies)
    return [folder / "site"], {}, copies


def torch_in_another(folder: Path) -> Layout:
    copies = pip_copies(folder / "its site")
    make_torch(folder / "its site", copies)
    make_engine(folder / "ours", copies)
    return [folder / "ours", folder / "its site"], {}, copies


def system_beside_pip(folder: Path) -> Layout:
    """An older cuDNN on the linker's path."""
    sites, _, copies = one_environment(folder)
    system = folder / "lib"
    Copies(system, system, new=False, version=".1.0", development=True).make()
    return sites, {"LD_LIBRARY_PATH": str(system)}, copies


def system_beside_another(folder: Path) -> Layout:
    sites, _, copies = torch_in_another(folder)
    system = folder / "lib"
    Copies(system, system, new=False, version=".1.0", development=True).make()
    return sites, {"LD_LIBRARY_PATH": str(system)}, copies


def toolkit_beside_pip(folder: Path) -> Layout:
    """A CUDA toolkit with a cuDNN of its own, to which variables lead."""
    sites, _, copies = one_environment(folder)
    toolkit = folder / "cuda"
    Copies(toolkit / "cudnn" / "lib", toolkit / "lib64", new=False, version=".1.0", development=True).make()
    return sites, {"CUDA_HOME": str(toolkit), "CUDNN_PATH": str(toolkit / "cudnn")}, copies


def one_lib_folder(folder: Path) -> Layout:
    """As conda has it: all in one folder, with an older version that was left there, and packages below."""
    lib, site = folder / "lib", folder / "lib" / "python3" / "site-packages"
    Copies(lib, lib, new=False, version=".9.9").make()  # a name that is sorted after the right one
    copies = Copies(lib, lib, version=".19.0", development=True).make()
    make_torch(site, copies)
    make_engine(site, copies)
    return [site], {"LD_LIBRARY_PATH": str(lib), "CUDA_HOME": str(folder)}, copies


LAYOUTS = (
    one_environment,
    torch_in_another,
    system_beside_pip,
    system_beside_another,
    toolkit_beside_pip,
    one_lib_folder,
)


def imported(layout: Layout, how: str) -> subprocess.CompletedProcess[str]:
    """Import torch, then Transformer Engine, in a process that starts with ``layout``; it prints what is loaded."""
    sites, variables, _ = layout
    outer = {
        name: value for name, value in os.environ.items() if not name.startswith(("CUD", "NVRTC", "CURAND", "LD_"))
    }
    inner = {**outer, **variables, "PYTHONPATH": os.pathsep.join(map(str, sites))}
    return subprocess.run(
        (sys.executable, "-c", PROGRAM, how), env=inner, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("make", LAYOUTS, ids=lambda make: make.__name__)
def test_the_loader_takes_torchs_copies(make: Callable[[Path], Layout], tmp_path: Path) -> None:
    layout = make(tmp_path)
    done = imported(layout, "led")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == layout[2].used


@pytest.mark.parametrize("make", LAYOUTS[1:], ids=lambda make: make.__name__)
def test_alone_the_loader_takes_others_or_finds_none(make: Callable[[Path], Layout], tmp_path: Path) -> None:
    """So each layout is one in which the loader needs to be led."""
    layout = make(tmp_path)
    done = imported(layout, "alone")
    assert done.returncode != 0 or json.loads(done.stdout) != layout[2].used


def test_files_are_read_as_the_kernel_lists_them(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f01-7f02 r-xp 00000000 08:01 11  /a folder/libcudnn.so.9.19.0\n"
        "7f02-7f03 rw-p 00001000 08:01 11  /a folder/libcudnn.so.9.19.0\n"
        "7f03-7f04 r-xp 00000000 08:01 12  /a folder/libcudnn_graph.so.9.19.0\n"
        "7f04-7f05 rw-p 00000000 00:00 0 \n"
        "7f05-7f06 rw-p 00000000 00:00 0  [heap]\n"
        "7f06-7f07 r-xp 00000000 08:01 13  /usr/lib/libcudnn.so.9\n"
        "7f07-7f08 r-xp 00000000 08:01 14  /usr/lib/libcublasLt.so.13\n"
        "7f08-7f09 r-xp 00000000 08:01 15  /usr/lib/libcublas.so.13\n"
    )
    assert loaded_files(maps) == {
        "cudnn": [Path("/a folder/libcudnn.so.9.19.0"), Path("/usr/lib/libcudnn.so.9")],
        "cublas": [Path("/usr/lib/libcublas.so.13")],
    }
    assert loaded_files(tmp_path / "none") == {}


def test_variables_are_restored_also_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDNN_HOME", "/the/users")
    monkeypatch.delenv("NVRTC_HOME", raising=False)

    def fail() -> None:
        with led_to_loaded():
            os.environ["NVRTC_HOME"] = "/of/the/import"
            raise ImportError

    with pytest.raises(ImportError):
        fail()
    assert {name: os.environ.get(name) for name in VARIABLES.values()} == {
        "CUDNN_HOME": "/the/users",
        "NVRTC_HOME": None,
        "CURAND_HOME": None,
    }


@pytest.mark.parametrize("told", [None, "all"])
def test_a_framework_that_is_not_wanted_is_not_missed(
    told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the library warns where JAX is installed and its own part for JAX is not."""
    (tmp_path / "warns.py").write_text(
        "import os, warnings\nframework = os.environ.get('NVTE_FRAMEWORK')\n"
        "if not framework:\n    warnings.warn('Detected a Jax installation')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "warns", raising=False)
    if told is None:
        monkeypatch.delenv("NVTE_FRAMEWORK", raising=False)
    else:
        monkeypatch.setenv("NVTE_FRAMEWORK", told)
    (library,) = import_led("warns")
    assert library.framework == (told or "pytorch")
    assert os.environ.get("NVTE_FRAMEWORK") == told


class Watched(dict[str, str]):
    """An environment that lists the names of what is written or removed."""

    def __init__(self, **values: str) -> None:
        super().__init__(values)
        self.touched: list[str] = []

    def __setitem__(self, name: str, value: str) -> None:
        self.touched.append(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self.touched.append(name)
        super().__delitem__(name)

    def pop(self, name: str, *default: Any) -> Any:
        self.touched.append(name)
        return super().pop(name, *default)


@pytest.mark.parametrize(("names", "restored"), [(None, "abc"), ((), ""), (("a", "d"), "a")])
def test_of_the_environment_only_what_changed_is_put_back(
    names: tuple[str, ...] | None, restored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of NCCL and gloo read it meanwhile."""
    environment = Watched(a="1", b="2", d="4", e="5")
    monkeypatch.setattr(os, "environ", environment)
    with environment_kept() if names is None else variables_kept(*names):
        environment["a"] = "7"
        del environment["b"]
        environment["c"] = "3"
        environment.touched.clear()
    assert sorted(environment.touched) == list(restored)
    assert environment.get("b") == ("2" if names is None else None)
