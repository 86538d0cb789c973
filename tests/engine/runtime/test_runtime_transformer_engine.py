"""Transformer Engine's own loader takes torch's CUDA libraries, in the layouts of environments that can be made here.

Nothing needs a GPU. Skipped where the library is missing; ``make te`` brings it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_run_engine.runtime.cuda_libraries import LIBRARIES
from tests.plugins.optional_library import skip_without
from tests.support.cuda_copies import Copies

pytestmark = [pytest.mark.te, pytest.mark.timeout(300)]

PROGRAM = """
import json, sys
from pathlib import Path
from megatron_run_engine.runtime.cuda_libraries import loaded_files
from megatron_run_engine.runtime.transformer_engine import import_led
if sys.argv[1] == "led":
    import_led("transformer_engine.common")  # which imports torch
    import torch
else:
    import torch
    import transformer_engine.common
maps = Path("/proc/self/maps").read_text().splitlines()
parts = {Path(line.split(maxsplit=5)[-1]).parent for line in maps if "/libcudnn" in line}
engine = Path(sys.modules["transformer_engine"].__file__).parents[1]
torchs = Path(torch.__file__).parents[1]
print(json.dumps([loaded_files(), sorted(parts), engine, torchs], default=str))
"""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A system's folder with an old cuDNN, toolkit's names and all."""
    skip_without("transformer_engine")
    if shutil.which("cc") is None:
        pytest.skip("libraries are compiled")
    folder = tmp_path_factory.mktemp("lib")
    Copies(folder, folder, new=False, version=".1.0", development=True).make()
    return folder


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that holds Transformer Engine beside this one, which holds torch: as a bundle's."""
    skip_without("transformer_engine")
    folder = tmp_path_factory.mktemp("beside")
    subprocess.run((sys.executable, "-m", "venv", "--without-pip", folder), check=True)
    python = folder / "bin" / "python"
    asked = (python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    site = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())
    spec = find_spec("transformer_engine")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    for each in (package, *package.parent.glob("transformer_engine*.dist-info"), *package.parent.glob("einops*")):
        shutil.copytree(each, site / each.name, copy_function=os.symlink, ignore=shutil.ignore_patterns("*.so"))
    for library in package.rglob("*.so"):
        (site / library.relative_to(package.parent)).symlink_to(library)
    for library in package.parent.glob("transformer_engine_torch*.so"):
        (site / library.name).symlink_to(library)
    (site / "torch.pth").write_text("\n".join(each for each in sys.path if each.endswith("site-packages")))
    return python


def loads(how: str, python: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    outer = {
        name: value for name, value in os.environ.items() if not name.startswith(("CUD", "NVRTC", "CURAND", "LD_"))
    }
    here = {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each.endswith("src"))}
    return subprocess.run(
        (str(python), "-c", PROGRAM, how),
        env={**outer, **here, **variables},
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )


@pytest.mark.parametrize("system_too", [False, True], ids=["alone", "beside a system's"])
@pytest.mark.parametrize("own", [False, True], ids=["torch's environment", "an environment of its own"])
def test_every_library_is_torchs(own: bool, system_too: bool, beside: Path, system: Path) -> None:
    variables = {"LD_LIBRARY_PATH": str(system)} if system_too else {}
    done = loads("led", beside if own else Path(sys.executable), **variables)
    assert done.returncode == 0, done.stderr
    files, parts, engine, torchs = json.loads(done.stdout.splitlines()[-1])
    assert (engine != torchs) is own
    assert files.keys() == set(LIBRARIES)
    for each in files.values():
        assert len(each) == 1
        assert each[0].startswith(f"{torchs}/nvidia/")
    assert parts == [f"{torchs}/nvidia/cudnn/lib"]


def test_by_itself_its_loader_fails_there(beside: Path, system: Path) -> None:
    """So the layouts are those in which it was seen to fail."""
    assert "cudnn shared object not found" in loads("alone", beside).stderr
    done = loads("alone", Path(sys.executable), LD_LIBRARY_PATH=str(system))
    assert done.returncode != 0
    assert "libcudnn" in done.stderr
