"""The notebooks of the documentation: each is stored with its outputs, and does what they show.

``python -m tests.docs.notebooks`` runs each in an empty folder, and stores its outputs where those that are stored are
of other kinds, or of other code: two runs differ in numbers, and two machines in what a model writes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.support.checkout import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
#: Where a page says that it happens: outputs name no folder of this machine.
THERE = "~/notebooks"
#: The notebook's metadata that tells of which code its outputs are.
DIGEST = "outputs_of"
_LIMIT = 900  # seconds for a notebook, many times what it takes

Cell = dict[str, Any]


def read(file: Path) -> dict[str, Any]:
    """A notebook, in the form of nbformat 4."""
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def code(notebook: dict[str, Any]) -> list[Cell]:
    """The cells that run."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(file: Path, folder: Path) -> dict[str, Any]:
    """``file`` as it is after all its cells have run in ``folder``. Raises where one of them does."""
    (folder / file.name).write_bytes(file.read_bytes())
    clean = {name: text for name, text in os.environ.items() if not name.startswith("MEGATRON_RUN_")}
    homes = {name: str(folder / ".home") for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR")}
    once = ("--to", "notebook", "--execute", f"--ExecutePreprocessor.timeout={_LIMIT}")
    # Pieces of a stream, which come by chance, are made one, as Jupyter has them.
    for words in (once, ("--coalesce-streams",)):
        done = subprocess.run(
            [sys.executable, "-m", "nbconvert", *words, "--inplace", file.name],
            cwd=folder,
            env={**clean, **homes},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
    return read(folder / file.name)


def digest(notebook: dict[str, Any]) -> str:
    """The digest of the code; :data:`DIGEST` of the metadata has the one of the code that made the stored outputs."""
    sources = ["".join(cell["source"]) for cell in code(notebook)]  # a list of lines, or a text
    return sha256(json.dumps(sources).encode()).hexdigest()


def is_stored(notebook: dict[str, Any], ran: dict[str, Any]) -> bool:
    """Whether the outputs in ``notebook`` are of its code, and of the kinds that it has after a run, in ``ran``."""
    alike = [*map(kinds, code(notebook))] == [*map(kinds, code(ran))]
    return alike and notebook["metadata"].get(DIGEST) == digest(notebook)


def kinds(cell: Cell) -> list[Any]:
    """What kinds of outputs a cell has: streams by name, shown values by their media types."""
    return [output.get("name") or sorted(output.get("data", ())) or output["output_type"] for output in cell["outputs"]]


def text(cell: Cell) -> str:
    """What a cell has printed, and its shown values as text."""
    found: Iterator[Any] = (
        output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell["outputs"]
    )
    return "".join(part if isinstance(part, str) else "".join(part) for part in found)


def stored(notebook: dict[str, Any], ran: dict[str, Any], folder: Path) -> str:
    """``notebook`` with the outputs of ``ran``, which ran in ``folder``, as the text of a file."""
    for cell, found in zip(code(notebook), code(ran), strict=True):
        cell["outputs"], cell["execution_count"] = found["outputs"], found["execution_count"]
    notebook["metadata"][DIGEST] = digest(notebook)
    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
    return text.replace(str(folder.resolve()), THERE) + "\n"


if __name__ == "__main__":
    for file in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as scratch:
            notebook, ran = read(file), run(file, Path(scratch))
            if not is_stored(notebook, ran):
                file.write_text(stored(notebook, ran, Path(scratch)), encoding="utf-8")
