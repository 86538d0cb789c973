"""Who opens files: what others may have made is opened in one place, which neither waits nor reads without an end.

Users' texts are read by one module, so that every command takes their marks, lines and ends alike.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.test_architecture_sources import SOURCES
from tests.support.checkout import ROOT

#: The readers: of a file, of the files of a folder, of those of a step; of users' texts and compressed files.
READERS = (
    "core/kernel/src/megatron_run/files/foreign_file.py",
    "core/kernel/src/megatron_run/files/safe_folder.py",
    "core/engine/src/megatron_run_engine/checkpoint/files.py",
    "core/engine/src/megatron_run_engine/data/user_files.py",
)
#: Libraries that unpack.
COMPRESSION = {"gzip", "bz2", "lzma", "zstandard"}
#: Calls that open a file by its path, wait for the other end of a FIFO there, and map or read a hole of any length.
BY_PATH = {
    *("os.open", "io.open", "np.load", "np.memmap", "np.fromfile", "np.loadtxt", "np.genfromtxt", "mmap.mmap"),
    *("json.load", "yaml.load", "tomllib.load", "pickle.load", "torch.load", "torch.from_file", "safe_open"),
    *("load_file", "ParquetFile", "parquet.read_table", "read_metadata", "Tokenizer.from_file", "BPE.from_file"),
    *("WordPiece.from_file", "from_pretrained", "ZipFile", "tarfile.open", "sqlite3.connect", "shutil.copyfile"),
    *("shutil.copy", "shutil.copy2", "shutil.copytree"),
}
#: Arguments by which libraries open a file.
BY_ARGUMENT = {"model_file", "tokenizer_file", "vocab_file"}
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
        "core/inference/src/megatron_run_inference/commands/evaluate.py",
        "core/inference/src/megatron_run_inference/commands/generate.py",
        f"{_KERNEL}/files/user_cache.py",
        f"{_ENGINE}/launch/api.py",
        f"{_ENGINE}/launch/job.py",
        f"{_ENGINE}/launch/start.py",
        f"{_ENGINE}/launch/watchdog/page.py",
        f"{_ENGINE}/launch/watchdog/sidecar.py",
        f"{_ENGINE}/estimate/calibration/on_ranks.py",
        f"{_KERNEL}/files/publishing.py",
        f"{_KERNEL}/files/temporary_names.py",
        "plugins/observer/profiler/src/megatron_run_observer_profiler/window.py",
    ),
    "sources, and what comes with the program": (
        f"{_ENGINE}/training/state/programs.py",
        "cli/src/megatron_run_cli/commands/new_package.py",
        f"{_KERNEL}/errors/install_hint.py",
        f"{_KERNEL}/registry/discover.py",
        f"{_KERNEL}/registry/importing.py",
    ),
    "the operating system": (
        "cli/src/megatron_run_cli/streams.py",
        f"{_ENGINE}/launch/watchdog/monitor.py",
        f"{_ENGINE}/checkpoint/memory_folder.py",
        f"{_ENGINE}/nn/linear.py",
        f"{_ENGINE}/runtime/cuda_libraries.py",
        f"{_ENGINE}/host/process.py",
        f"{_ENGINE}/host/rank_environment.py",
        f"{_ENGINE}/run_folder/restart_times.py",
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
        f"{_ENGINE}/run_folder/lock.py",
        f"{_ENGINE}/run_folder/records.py",
        f"{_KERNEL}/errors/machine_limits.py",
        "plugins/format/distributed/src/megatron_run_format_distributed/__init__.py",
        "plugins/format/megatron/src/megatron_run_format_megatron/rank_files.py",
        "plugins/observer/tensorboard/src/megatron_run_observer_tensorboard/__init__.py",
    ),
    "presets and pages, which come with the program; words of YAML": (
        "core/report/src/megatron_run_report/page/__init__.py",
        f"{_KERNEL}/config/presets.py",
        f"{_KERNEL}/config/yaml.py",
    ),
    "what a reader of this list has opened": (
        f"{_ENGINE}/data/indexed_files.py",
        f"{_ENGINE}/data/token_cache.py",
        f"{_INDEXED}/parts.py",
    ),
    "what a reader of this list has looked at, just before a library opens it": (
        f"{_ENGINE}/checkpoint/reader.py",
        f"{_ENGINE}/data/token_ids.py",
        f"{_ENGINE}/data/tokenizer_files.py",
        f"{_ENGINE}/data/tokenizer_folder/by_transformers.py",
        f"{_INDEXED}/parquet_file.py",
        "plugins/data/indexed/src/megatron_run_data_indexed/cache.py",
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
            yield from _by_path(node)


def _by_path(call: ast.Call) -> Iterator[str]:
    """What of a library ``call`` is that opens a file by its path."""
    last = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if alike := [each for each in BY_PATH if each.rpartition(".")[2] == last]:
        called = f".{ast.unparse(call.func)}"  # which takes a while
        yield from (each for each in alike if called.endswith(f".{each}"))
    yield from {str(each.arg) for each in call.keywords} & BY_ARGUMENT


def _for_reading(call: ast.Call) -> bool:
    """Whether an ``open`` reads; that of os and of a safe folder takes flags instead of a mode."""
    places = call.args if isinstance(call.func, ast.Attribute) else call.args[1:]
    modes = [*places[:1], *(each.value for each in call.keywords if each.arg == "mode")]
    return not modes or (isinstance(modes[0], ast.Constant) and str(modes[0].value).startswith("r"))


def test_users_files_are_opened_in_one_place() -> None:
    """A reader of its own waits for a FIFO, reads a hole whole, forgets a mark or ends lines at U+2028."""
    reads = {
        file.relative_to(ROOT).as_posix(): found
        for file in SOURCES
        if "testing" not in file.parts and (found := sorted(set(readings(ast.parse(file.read_text("utf-8"))))))
    }
    allowed = {*READERS, *(file for files in ALLOWED.values() for file in files)}
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
        "os.open(path, os.O_RDONLY)",
        "np.memmap(path)",
        "np.load(path, mmap_mode='r')",
        "mmap.mmap(file.fileno(), 0)",
        "parquet.ParquetFile(path)",
        "json.load(file)",
        "yaml.load(file)",
        "tokenizers.Tokenizer.from_file(path)",
        "models.BPE.from_file(vocab, merges)",
        "SentencePieceProcessor(model_file=path)",
        "torch.load(path)",
        "shutil.copyfile(path, other)",
    ],
)
def test_a_reader_is_found(source: str) -> None:
    assert list(readings(ast.parse(source)))


@pytest.mark.parametrize(
    "source", ["path.open('wb')", "folder.open(name, 0)", "read_text(it)", "read_file(path)", "Proc(model_proto=it)"]
)
def test_other_calls_are_none(source: str) -> None:
    assert not list(readings(ast.parse(source)))


def test_a_tokenizer_becomes_json_in_one_place() -> None:
    """The library goes through all ids up to the highest, and one of a file may be 10^9: that is looked at first."""
    writers = [
        file.relative_to(ROOT).as_posix()
        for file in SOURCES
        if "to_str" in (source := file.read_text("utf-8"))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr == "to_str"
    ]
    assert writers == [f"{_ENGINE}/data/tokenizer_json.py"]
