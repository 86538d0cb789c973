"""Numbers that nobody means, in the place of each number that a configuration or a file gives: an answer all the same.

Who forgets a bound before a loop or an allocation is found here: an answer has the time and the memory of the fuzzer's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_run_cli.reports.keys import KeyInfo, all_keys, installed_plugins
from tests.campaigns.figures import Figures
from tests.campaigns.fuzz import read_all
from tests.campaigns.fuzzed import CONFIG, PLAN, READERS, FuzzedReader, reads
from tests.campaigns.readers import run_command

#: What stands in the place of a number, and what the fuzzer's limits were not made for.
HUGE = ("1000000", "1000000000", "1000000000000000000")
#: The words of a type that is a number, or a list of them.
_NUMBERS = re.compile(r"\b(int|number|span|time)\b")
#: What a plugin needs beside it, so that all else in ``preset:tiny`` is right for it.
_BESIDE = {
    "model=bert": ("--plugin", "data=mock"),
}
#: Plugins of another device, or of data that is not here.
_COMMANDS = ("config show", "a dry run", "a plan")


def _words(key: KeyInfo, value: str) -> tuple[str, ...]:
    """The words that give ``key`` its ``value``."""
    listed = f"[{value}]" if key.type.startswith("list") else value
    plugin = ("--plugin", key.owner) if key.owner else ()
    return (*plugin, *_BESIDE.get(key.owner, ()), "--set", f"{key.name}={listed}")


def keys() -> list[KeyInfo]:
    """Every key of a configuration that takes a number, those of all installed plugins among them."""
    return [key for key in all_keys(installed_plugins().plugins) if _NUMBERS.search(key.type)]


def _configured(path: Path, *command: str) -> object:
    return run_command(*command, *json.loads(path.read_bytes()))


def _shown(path: Path) -> object:
    return _configured(path, "config", "show", "preset:tiny")


def _dry(path: Path) -> object:
    return _configured(path, "preset:tiny", "--dry-run")


def _planned(path: Path) -> object:
    return _configured(path, "plan", "search", "preset:tiny", "--gpus", "8", "--device", "a100")


for _name, _group, _read in (("config show", CONFIG, _shown), ("a dry run", CONFIG, _dry), ("a plan", PLAN, _planned)):
    reads(f"{_name} with huge numbers", _group, "words/words.json", _read, share=0.0)


def huge(reader: FuzzedReader, corpus: Sequence[bytes], count: int, seed: int) -> Iterator[bytes]:
    """The inputs of ``reader`` in which one number is huge, about ``count`` of them from the one of ``seed`` on."""
    found = list(_configurations() if reader.file.startswith("words/") else _files(corpus[0]))
    step = max(1, len(found) // count)
    yield from found[seed % step :: step]


def _configurations() -> Iterator[bytes]:
    for key in keys():
        for value in HUGE:
            yield json.dumps(_words(key, value)).encode()


def _files(content: bytes) -> Iterator[bytes]:
    """``content`` with one of its decimal numbers replaced, where it is a text."""
    try:
        content.decode()
    except UnicodeDecodeError:
        return
    for found in re.finditer(rb"(?<![\w.])\d+(?![\w.])", content):
        for value in HUGE:
            yield content[: found.start()] + value.encode() + content[found.end() :]


def numbers(folder: Path, share: float, seed: int, jobs: int, only: Sequence[str] = ()) -> list[Figures]:
    """Each number of each reader's file and of each key, huge: a row for each group of readers."""
    tasks = [(name, max(1, round(10_000 * share))) for name in only or READERS]
    return read_all("a huge number", tasks, huge, folder, seed, jobs)
