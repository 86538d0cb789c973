"""A second environment with the running one's packages behind it, in a tenth of a second and without a network."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

#: Variables that would let the outer environment leak into the inner one.
LEAKS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class Scratch:
    """An environment in ``folder``: ``pip`` installs into it; the packages behind it are seen and never changed.

    With ``ours`` false, the project's own distributions are hidden, as in an environment where nobody installed them
    yet, while everything they depend on is there but ``hidden``, the packages whose files begin with one of these
    names.
    """

    def __init__(self, folder: Path, *, ours: bool = True, hidden: tuple[str, ...] = ()) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.folder = folder
        self.python = folder / "bin" / "python"
        self._hidden = ("megatron_run", "__editable__.megatron_run", *hidden)
        parent = Path(sysconfig.get_path("purelib"))
        line = f"import site; site.addsitedir({str(parent)!r})" if ours else str(self._third_party(parent))
        (self._site_packages / "_behind.pth").write_text(line + "\n", encoding="utf-8")

    @property
    def _site_packages(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / version / "site-packages"

    def _third_party(self, parent: Path) -> Path:
        """A folder of links to what is installed, without ours. On the path it is no site folder: no .pth is read."""
        links = self.folder / "third_party"
        links.mkdir()
        for entry in parent.iterdir():
            if not entry.name.startswith(self._hidden):
                (links / entry.name).symlink_to(entry)
        return links

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run this environment's Python; the caller looks at the exit status."""
        return self._call([self.python, *arguments])

    def command(self, name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a console script that was installed into this environment."""
        return self._call([self.folder / "bin" / name, *arguments])

    def pip(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run pip on this environment; the caller looks at the exit status."""
        return self._call(
            [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python, *arguments]
        )

    def _call(self, command: list[str | Path]) -> subprocess.CompletedProcess[str]:
        inner = {name: value for name, value in os.environ.items() if name not in LEAKS}
        return subprocess.run(command, capture_output=True, text=True, env=inner, timeout=300, check=False)
