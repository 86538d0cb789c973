"""Numbers that nobody means, in the place of each number that a configuration or a file gives: an answer all the same.

Who forgets a bound before a loop or an allocation is found here: an answer has the time and the memory of the fuzzer's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from megatron_run_cli.main import program
from megatron_run_cli.reports.keys import KeyInfo, all_keys, installed_plugins
from tests.campaigns.figures import Figures
from tests.campaigns.fuzz import read_all
from tests.campaigns.fuzzed import CONFIG, PLAN, READERS, FuzzedReader, reads
from tests.campaigns.readers import run_command

#: What stands in the place of a number.
HUGE = ("1000000", "1000000000", "1000000000000000000")
#: The words of a type that is a number, or a list of them.
_NUMBERS = re.compile(r"\b(int|number|span|time)\b")
#: Commands that compute and write nothing, with words that they take.
_COMMANDS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("train",): ("preset:tiny", "--dry-run"),
    ("schedule", "show"): ("preset:tiny", "--plugin", "schedule=1f1b", "--stages", "4", "--microbatches", "8"),
    ("plan", "search"): ("preset:tiny", "--gpus", "8", "--device", "a100"),
    ("plan", "goodput"): ("preset:tiny", "--gpus", "8", "--device", "a100"),
    ("plan", "schedule"): ("preset:tiny", "--gpus", "4", "--device", "a100", "--effort", "0.01"),
}
#: Layers over stages, each as many as one configuration may have alone.
_DEEP = tuple(
    (f"--set=model.num_layers={layers}", f"--set=parallel.pipeline={stages}", "--set=schedule.use=1f1b")
    for layers, stages in ((20_000, 1), (100_000, 1), (2_000, 2_000), (100_000, 1_000), (100_000, 100_000))
)
#: Words of a dry run whose numbers are huge together: the bound of one of them keeps the others from being read.
_TOGETHER = (
    ("--nproc={}", "--set=train.global_batch_size={}", "--set=train.micro_batch_size=1"),
    tuple(
        f"--set=train.{key}={value}"
        for key, value in {
            "global_batch_size": "{}",
            "micro_batch_size": 1,
            "ramp_up.start": 1,
            "ramp_up.increment": 1,
            "ramp_up.samples": "{}",
        }.items()
    ),
)


def _words(key: KeyInfo, value: str) -> tuple[str, ...]:
    """The words that give ``key`` its ``value``."""
    listed = f"[{value}]" if key.type.startswith("list") else value
    plugin = ("--plugin", key.owner) if key.owner else ()
    return (*plugin, "--set", f"{key.name}={listed}")


def deep() -> Iterator[tuple[str, ...]]:
    """The words of commands about many layers times many stages."""
    for words in _DEEP:
        yield ("preset:tiny", "--dry-run", *words)
        yield ("plan", "search", "preset:tiny", "--as-is", "--gpus", words[1].rpartition("=")[2], *words)
        yield ("schedule", "show", "preset:tiny", *words)


def options() -> Iterator[tuple[str, ...]]:
    """The words of ``_COMMANDS`` with each of their options that takes a value, which is huge."""
    for command, words in _COMMANDS.items():
        found: click.Command = program
        for name in command:
            assert isinstance(found, click.Group)
            inner = found.get_command(click.Context(found), name)
            assert inner, command
            found = inner
        for option in found.params:
            if isinstance(option, click.Option) and not option.is_flag and not isinstance(option.type, click.Path):
                yield from ((*command, *words, option.opts[-1], value) for value in HUGE)
    yield from deep()
    for words in _TOGETHER:
        yield from (("preset:tiny", "--dry-run", *(word.replace("{}", value) for word in words)) for value in HUGE)


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


def _optional(path: Path) -> object:
    return _configured(path, *(("--version",) if path.read_bytes() == b"[]" else ()))


_OPTIONS = "options with huge numbers"
for _name, _group, _read in (("config show", CONFIG, _shown), ("a dry run", CONFIG, _dry), ("a plan", PLAN, _planned)):
    reads(f"{_name} with huge numbers", _group, "words/words.json", _read, share=0.0)
reads(_OPTIONS, CONFIG, "words/words.json", _optional, share=0.0)


def huge(reader: FuzzedReader, corpus: Sequence[bytes], count: int, seed: int) -> Iterator[bytes]:
    """The inputs of ``reader`` in which one number is huge, about ``count`` of them from the one of ``seed`` on."""
    if reader.name == _OPTIONS:
        found = [json.dumps(words).encode() for words in options()]
    else:
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
