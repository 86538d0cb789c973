"""Pages show what commands print; this runs the commands again.

A console is a code block of language ``console``: a line ``$ megatron-run ...``, then what it prints, then the next. A
line ``...`` stands for any lines. The commands run in a folder that holds the examples by their file names,
and text to train on.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from megatron_run_cli.main import main
from tests.docs.quoted import pages
from tests.support.checkout import ROOT

_BLOCK = re.compile(r"^```console\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"^\$ (?P<command>.*)\n(?P<output>(?:(?!\$ ).*\n)*)", re.MULTILINE)
#: Its commands run in an environment without torch, by tests/architecture/test_architecture_without_torch.py.
_ELSEWHERE = "without-torch.md"
_EXAMPLES = (ROOT / "tests/examples/plugins", ROOT / "tests/examples/configs", ROOT / "tests/planner/tables")


@dataclass(frozen=True)
class Shown:
    """A command on a page, and what the page says it prints."""

    command: str
    output: str

    def agrees(self, printed: str) -> bool:
        """Whether the page shows ``printed``; a line ``...`` stands for any lines."""
        pattern = re.escape(self.output).replace(re.escape("...\n"), r"(?:.*\n)*")
        return re.fullmatch(pattern, printed) is not None


def console_pages() -> list[Path]:
    """The pages whose commands run here."""
    return [page for page in pages() if page.name != _ELSEWHERE]


def shown(page: str) -> Iterator[Shown]:
    """Every command of every console on ``page``."""
    for block in _BLOCK.finditer(page):
        for match in _COMMAND.finditer(block["text"]):
            yield Shown(match["command"], match["output"])


def printed(command: str) -> str:
    """What ``command`` (``megatron-run ...``) writes to its standard output and error."""
    return run(command)[1]


def run(command: str, *more: str) -> tuple[int, str]:
    """The exit code of ``command`` with the words ``more``, and what it writes."""
    program, *words = shlex.split(command, comments=True)
    assert program == "megatron-run", command
    out = io.StringIO()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for example in (file for examples in _EXAMPLES for file in examples.iterdir() if file.is_file()):
            (folder / example.name).write_bytes(example.read_bytes())
        write_text(folder)
        clean = {name: text for name, text in os.environ.items() if not name.startswith("MEGATRON_RUN_")}
        stack.enter_context(mock.patch.dict(os.environ, clean, clear=True))
        stack.enter_context(chdir(folder))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(out))
        code = main([*words, *more])
    return code, out.getvalue()


def write_text(folder: Path) -> None:
    """The texts that pages name as a reader's own: ``src/**/*.py`` and ``notes.md``, enough for every split."""
    (folder / "src").mkdir()
    for index in range(200):
        (folder / "src" / f"module{index}.py").write_text(f"# Module {index}.\n" + "x = 1\n" * 300)
    (folder / "notes.md").write_text("Notes.\n" * 1000)


def refreshed(page: str) -> str:
    """``page`` with every console as the commands print now, save where it leaves lines out with ``...``."""

    def again(match: re.Match[str]) -> str:
        return match[0] if "...\n" in match["output"] else f"$ {match['command']}\n{printed(match['command'])}"

    return _BLOCK.sub(lambda block: f"```console\n{_COMMAND.sub(again, block['text'])}```", page)


if __name__ == "__main__":
    for file in console_pages():
        file.write_text(refreshed(file.read_text(encoding="utf-8")), encoding="utf-8")
