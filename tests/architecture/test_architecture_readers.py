"""Who reads the files of users: one module, so that every command takes their marks, lines and ends alike."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.test_architecture_sources import SOURCES
from tests.support.checkout import ROOT

#: The reader of users' texts, JSON lines and compressed files.
READER = "core/engine/src/megatron_run_engine/data/user_files.py"
#: Libraries that unpack.
COMPRESSION = {"gzip", "bz2", "lzma", "zstandard"}
#: Methods that read a file at once, or cut a text where no other program does.
METHODS = {"read_text", "read_bytes", "splitlines"}
_ENGINE, _KERNEL, _INDEXED = (
    "core/engine/src/megatron_run_engine",
    "core/kernel/src/megatron_run",
    "plugins/data/indexed/src/megatron_run_data_indexed/preparation",
)
#: What other files read, by why it is no user's text.
ALLOWED = {
    "what this program has written": (
        "cli/src/megatron_run_cli/commands/evaluate.py",
        "cli/src/megatron_run_cli/commands/generate.py",
        f"{_ENGINE}/checkpoint/adapted.py",
        f"{_ENGINE}/data/token_cache.py",
        f"{_ENGINE}/data/user_cache.py",
        f"{_ENGINE}/launch/api.py",
        f"{_ENGINE}/launch/rank.py",
        f"{_ENGINE}/launch/results.py",
        f"{_ENGINE}/launch/watchdog/page.py",
        f"{_ENGINE}/launch/watchdog/sidecar.py",
        f"{_ENGINE}/training/calibration/on_ranks.py",
        f"{_INDEXED}/about.py",
        f"{_INDEXED}/parts.py",
        "plugins/observer/profiler/src/megatron_run_observer_profiler/window.py",
    ),
    "sources, and what comes with the program": (
        f"{_ENGINE}/training/state/programs.py",
        "cli/src/megatron_run_cli/commands/plugins.py",
        f"{_KERNEL}/errors.py",
        f"{_KERNEL}/registry/discover.py",
        f"{_KERNEL}/registry/load.py",
        "plugins/graph-capture/partial/src/megatron_run_graph_capture_partial/native.py",
    ),
    "the operating system": (
        "cli/src/megatron_run_cli/streams.py",
        f"{_ENGINE}/launch/watchdog/monitor.py",
        f"{_ENGINE}/nn/linear.py",
        f"{_ENGINE}/runtime/cuda_libraries.py",
        f"{_ENGINE}/training/process.py",
        f"{_ENGINE}/training/rank_environment.py",
    ),
    "words of its own, of an error or of another process": (
        "cli/src/megatron_run_cli/commands/doctor.py",
        "cli/src/megatron_run_cli/reports/library_report.py",
        "cli/src/megatron_run_cli/reports/probe.py",
        "core/planner/src/megatron_run_planner/accuracy/calibrate.py",
        f"{_ENGINE}/formats/convert.py",
        f"{_ENGINE}/formats/gpt_tensors.py",
        f"{_ENGINE}/launch/failures.py",
        f"{_ENGINE}/launch/rank_output.py",
        f"{_ENGINE}/launch/rendezvous.py",
        f"{_ENGINE}/run_folder/opening.py",
        "plugins/format/distributed/src/megatron_run_format_distributed/__init__.py",
        "plugins/format/megatron/src/megatron_run_format_megatron/rank_files.py",
        "plugins/graph-capture/partial/src/megatron_run_graph_capture_partial/__init__.py",
        "plugins/observer/tensorboard/src/megatron_run_observer_tensorboard/__init__.py",
    ),
    "configurations and tables, decoded as utf-8-sig, where the engine cannot be imported": (
        f"{_KERNEL}/config/sources.py",
        f"{_KERNEL}/config/yaml.py",
        "core/planner/src/megatron_run_planner/accuracy/__init__.py",
        "core/planner/src/megatron_run_planner/devices/__init__.py",
        "plugins/format/megatron/src/megatron_run_format_megatron/launch_script/script.py",
    ),
    "one JSON value, which parse_json frees of its mark": (
        "cli/src/megatron_run_cli/reports/plan_timeline.py",
        "plugins/format/megatron/src/megatron_run_format_megatron/launch_script/data_section.py",
    ),
    "where blocks end, which the reader then reads": (f"{_INDEXED}/inputs.py",),
    "all bytes of what it hashes, and its own hashes": (f"{_ENGINE}/data/file_hashes.py",),
    "numbers and models, which are binary": (f"{_ENGINE}/data/indexed_files.py", f"{_ENGINE}/data/tokenizer.py"),
    "tokenizers, which are kept and hashed byte by byte": (
        f"{_ENGINE}/data/standalone_tokenizer.py",
        f"{_ENGINE}/data/tokenizer_folder/__init__.py",
        f"{_ENGINE}/data/tokenizer_folder/folder_files.py",
    ),
}


def readings(tree: ast.AST) -> Iterator[str]:
    """What ``tree`` opens, unpacks or cuts into lines by itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in COMPRESSION)
        elif isinstance(node, ast.ImportFrom):
            yield from {node.module or ""} & COMPRESSION
        elif isinstance(node, ast.Call):
            method = isinstance(node.func, ast.Attribute)
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if (name == "open" and _for_reading(node)) or (method and name in METHODS):
                yield name


def _for_reading(call: ast.Call) -> bool:
    """Whether an ``open`` reads; that of os and of a safe folder takes flags instead of a mode."""
    places = call.args if isinstance(call.func, ast.Attribute) else call.args[1:]
    modes = [*places[:1], *(each.value for each in call.keywords if each.arg == "mode")]
    return not modes or (isinstance(modes[0], ast.Constant) and str(modes[0].value).startswith("r"))


def test_users_files_are_opened_in_one_place() -> None:
    """A reader of its own forgets a mark, ends lines at U+2028 or takes a broken .zst for a whole one."""
    reads = {
        file.relative_to(ROOT).as_posix(): found
        for file in SOURCES
        if "testing" not in file.parts and (found := sorted(set(readings(ast.parse(file.read_text("utf-8"))))))
    }
    allowed = {READER, *(file for files in ALLOWED.values() for file in files)}
    assert {file: found for file, found in reads.items() if file not in allowed} == {}
    assert sorted(allowed - reads.keys()) == [], "an exception that nobody needs is none"


@pytest.mark.parametrize(
    "source",
    [
        "open(path)",
        "open(path, 'rb')",
        "path.open()",
        "path.open(encoding='utf-8')",
        "path.open('rb')",
        "path.open(mode='r')",
        "path.read_text(encoding='utf-8')",
        "path.read_bytes()",
        "text.splitlines()",
        "import gzip",
        "from zstandard import open",
    ],
)
def test_a_reader_is_found(source: str) -> None:
    assert list(readings(ast.parse(source)))


@pytest.mark.parametrize("source", ["path.open('wb')", "os.open(path, flags)", "folder.open(name, 0)", "read_text(it)"])
def test_other_calls_are_none(source: str) -> None:
    assert not list(readings(ast.parse(source)))
