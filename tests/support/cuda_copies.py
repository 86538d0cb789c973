"""Copies of CUDA's libraries, for every place where machines have them: shared objects, compiled here, that do nothing.

Each copy has the names, sonames and symbol versions of the real ones, so that the linker and a loader treat them alike.
A ``torch`` loads its copy when it is imported; a ``transformer_engine`` searches the places in which the real one's
loader searches, in its order, then loads a library that needs cuDNN's newest symbol.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

#: Library -> its major version in file names.
MAJORS = {"cudnn": "9", "cublas": "13", "nvrtc": "13", "curand": "10"}

_TORCH = """\
import ctypes
for file in {files}:
    ctypes.CDLL(file)
"""
_ENGINE = """\
import ctypes, glob, os
from pathlib import Path

HERE = Path(__file__).parents[1]  # its own environment's packages
GLOBAL = ctypes.RTLD_GLOBAL


def system(name):
    homes = (f"{name.upper()}_HOME", f"{name.upper()}_PATH", "CUDA_HOME", "CUDA_PATH")
    for home in (os.environ[each] for each in homes if each in os.environ):
        files = sorted(glob.glob(f"{home}/**/lib{name}.so*", recursive=True), key=os.path.basename)
        if files:
            return ctypes.CDLL(files[-1], mode=GLOBAL)
    try:
        return ctypes.CDLL(f"lib{name}.so", mode=GLOBAL)
    except OSError:
        return None


def pip(name):
    found = [*HERE.glob(f"nvidia/cu13/lib/lib{name}*.so.*[0-9]"), *HERE.glob(f"nvidia/{name}/lib/lib*.so.*[0-9]")]
    if not found:
        raise RuntimeError(f"{name} shared object not found.")
    return [ctypes.CDLL(str(each), mode=GLOBAL) for each in found]


def load(name):
    return system(name) is not None or not pip(name)


load("cudnn")
if not any([load("nvrtc"), load("curand")]):
    for name in ("cublas", "cudnn"):
        pip(name)
ctypes.CDLL(str(Path(__file__).parent / "libtransformer_engine.so"), mode=GLOBAL)
"""


def compile_library(file: Path, code: str, *options: str, versions: str = "") -> Path:
    """Compile ``code`` to the shared object ``file``, whose symbols have the version ``versions`` if given."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:  # loaders take every file for a library that begins as one
        source, script = Path(folder) / "library.c", Path(folder) / "versions"
        source.write_text(code)
        if versions:
            script.write_text(f"{versions} {{ global: *; }};\n")
            options = (*options, f"-Wl,--version-script={script}")
        command = ("cc", "-shared", "-fPIC", "-O0", "-o", str(file), str(source), "-Wl,--no-as-needed", *options)
        subprocess.run(command, check=True, capture_output=True, text=True)
    return file


#: By soname and code what was compiled: a library has no path of its own, and finds others beside itself.
_COMPILED: dict[tuple[str, str], bytes] = {}


@dataclass
class Copies:
    """One copy of every library, in the folders ``cudnn`` and ``cuda``; ``version`` follows the major in files' names.

    A cuDNN that is not ``new`` lacks the symbol that Transformer Engine's library needs. With ``development`` there are
    names without a version, as a toolkit and a system have them and pip's packages do not.
    """

    cudnn: Path
    cuda: Path
    new: bool = True
    version: str = ""
    development: bool = False
    files: dict[str, Path] = field(default_factory=dict)

    def make(self) -> Copies:
        """Compile all."""
        newest = "int cudnnNewest(void) { return 1; }" if self.new else ""
        self._one("cudnn", "int cudnnGetVersion(void) { return 9; }")
        graph = self._one("cudnn_graph", f"int cudnnGraph(void) {{ return 1; }}\n{newest}")
        uses = "cudnnNewest" if self.new else "cudnnGraph"
        self._one("cudnn_ops", f"int {uses}(void);\nint cudnnOps(void) {{ return {uses}(); }}", str(graph))
        for name in ("cublas", "nvrtc", "curand"):
            self._one(name, f"int {name}Get(void) {{ return 1; }}")
        return self

    def _one(self, name: str, code: str, *linked: str) -> Path:
        folder = self.cudnn if name.startswith("cudnn") else self.cuda
        soname = f"lib{name}.so.{MAJORS[name.partition('_')[0]]}"
        file = folder / f"{soname}{self.version}"
        if (soname, code) in _COMPILED:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_bytes(_COMPILED[soname, code])
        else:
            compile_library(file, code, f"-Wl,-soname,{soname}", "-Wl,-rpath,$ORIGIN", *linked, versions=soname)
            _COMPILED[soname, code] = file.read_bytes()
        if self.version:
            link = folder / soname
            link.unlink(missing_ok=True)
            link.symlink_to(file.name)
        if self.development:
            (folder / f"lib{name}.so").symlink_to(soname)
        self.files[name] = file
        return file

    @property
    def used(self) -> Mapping[str, list[str]]:
        """As :func:`loaded_files` gives it when this copy alone is loaded."""
        return {name: [str(self.files[name].resolve())] for name in MAJORS}


def make_torch(site: Path, copies: Copies) -> None:
    """A ``torch`` in ``site`` that loads ``copies``; NVRTC only by a library of its own, when it compiles."""
    loads = [str(copies.files[name]) for name in ("cudnn", "cublas", "curand")]
    nvrtc = copies.files["nvrtc"]
    lazy = site / "torch" / "lib" / "libcaffe2_nvrtc.so"
    place = ("-Wl,--disable-new-dtags", f"-Wl,-rpath,{nvrtc.parent}")  # before LD_LIBRARY_PATH, as in torch's wheels
    compile_library(lazy, "int nvrtcGet(void);", str(nvrtc), *place)
    (site / "torch" / "__init__.py").write_text(_TORCH.format(files=loads))


def make_engine(site: Path, copies: Copies) -> None:
    """A ``transformer_engine`` in ``site``, built against ``copies``."""
    package = site / "transformer_engine"
    needed = [str(copies.files[name]) for name in ("cudnn", "cudnn_graph", "cudnn_ops", "cublas")]
    code = "int cudnnNewest(void);\nint uses(void) { return cudnnNewest(); }"
    compile_library(package / "libtransformer_engine.so", code, "-Wl,-z,now", *needed)
    (package / "__init__.py").write_text(_ENGINE)
    (package / "pytorch.py").write_text("")
