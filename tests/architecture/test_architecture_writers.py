"""Who writes on the disk: by one of two ways, so that no link is followed, and what is there is whole.

Below a run folder everything goes through ``SafeFolder``; what a user names goes through ``publishing``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.test_architecture_sources import SOURCES
from tests.support.checkout import ROOT

#: Functions of these modules that change names or contents.
MODULES = {
    "os": {
        "link", "makedirs", "mkdir", "mkfifo", "mknod", "remove", "removedirs", "rename", "renames", "replace", "rmdir",
        "symlink", "truncate", "ftruncate", "unlink",
    },
    "shutil": {"copy", "copy2", "copyfile", "copytree", "make_archive", "move", "rmtree", "unpack_archive"},
    "json": {"dump"},
    "np": {"memmap", "save", "savetxt", "savez", "savez_compressed"},
    "torch": {"save"},
}  # fmt: skip
#: Methods and functions that do so whatever they belong to.
NAMES = {
    "copy_into", "export_chrome_trace", "_dump_snapshot", "extractall", "FileHandler", "hardlink_to", "mkdir",
    "mkdtemp", "mkstemp", "move_into", "NamedTemporaryFile", "open_memmap", "ParquetWriter", "rename", "rmdir",
    "rmtree", "save_file", "save_model", "save_pretrained", "savefig",
    "SummaryWriter", "symlink_to", "TemporaryDirectory", "TemporaryFile", "to_csv", "to_parquet", "tofile", "touch",
    "truncate", "unlink", "write_bytes", "write_table", "write_text",
}  # fmt: skip
#: Only of calls of these names the owner is written out, which takes a while.
_LOOKED_AT = {"open", "replace", "ZipFile", *NAMES, *(name for names in MODULES.values() for name in names)}
#: What only reads, among the flags of ``os.open``.
READING = {"O_RDONLY", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "_FOLDER"}
_CLI, _ENGINE, _INFERENCE, _KERNEL, _INDEXED = (
    "cli/src/megatron_run_cli",
    "core/engine/src/megatron_run_engine",
    "core/inference/src/megatron_run_inference",
    "core/kernel/src/megatron_run",
    "plugins/data/indexed/src/megatron_run_data_indexed",
)
#: What writes itself, by why, with what it does: another way in one of these files is a finding too.
ALLOWED: dict[str, dict[str, str]] = {
    "the two ways": {
        f"{_KERNEL}/files/publishing.py": "Path.replace mkdir open rename rmdir shutil.rmtree unlink",
        f"{_KERNEL}/files/safe_folder.py": "os.mkdir os.open os.replace os.unlink shutil.rmtree",
        f"{_KERNEL}/files/temporary_names.py": "os.open os.unlink shutil.rmtree",
    },
    "the checkpoints' own file system, which tests stop before each change; it follows no link": {
        f"{_ENGINE}/checkpoint/files.py": "Path.replace mkdir os.ftruncate os.open os.rmdir os.unlink rename",
        f"{_ENGINE}/checkpoint/exchange.py": "unlink",
        f"{_ENGINE}/checkpoint/memory_home.py": "rename",
        f"{_ENGINE}/checkpoint/saving.py": "rename unlink",
    },
    "the run folder itself and its lock, which no file is below": {
        f"{_ENGINE}/run_folder/lock.py": "os.ftruncate os.open unlink",
        f"{_ENGINE}/run_folder/opening.py": "mkdir",
        f"{_ENGINE}/run_folder/undoing.py": "rmdir",
    },
    "a file that SafeFolder has opened": {f"{_ENGINE}/builtin/observer/jsonl.py": "truncate"},
    "a folder that publishing has made": {
        f"{_CLI}/commands/new_package.py": "mkdir write_text",
        "plugins/format/huggingface/src/megatron_run_format_huggingface/model_folder.py": "rename",
        f"{_INDEXED}/cache.py": "mkdir np.save shutil.rmtree",
    },
    "a file that publishing has opened": {f"{_INDEXED}/preparation/import_export.py": "ParquetWriter write_table"},
    "a pipe or the terminal": {f"{_CLI}/output.py": "write_text", f"{_CLI}/streams.py": "open os.open"},
    "the user's cache, where only its user can write: folders, locks, empty marks, and what goes": {
        f"{_ENGINE}/data/contents.py": "open",
        f"{_ENGINE}/data/standalone_tokenizer.py": "mkdir",
        f"{_ENGINE}/data/token_cache.py": "TemporaryFile unlink",
        f"{_ENGINE}/data/token_ids.py": "touch",
        f"{_KERNEL}/files/user_cache.py": "mkdir open",
    },
    "the folder PREFIX.preparing and its lock, with which a killed command goes on": {
        f"{_INDEXED}/preparation/prepare.py": "mkdir open rmdir unlink",
    },
    "private temporary folders and files": {
        f"{_CLI}/commands/doctor.py": "NamedTemporaryFile",
        f"{_INFERENCE}/commands/evaluate.py": "TemporaryDirectory",
        f"{_INFERENCE}/commands/generate.py": "TemporaryDirectory",
        f"{_INFERENCE}/evaluation.py": "write_text",
        f"{_INFERENCE}/generating.py": "write_text",
        f"{_ENGINE}/launch/api.py": "TemporaryDirectory mkdir",
        f"{_ENGINE}/launch/job.py": "write_text",
        f"{_ENGINE}/launch/start.py": "TemporaryDirectory os.open rename shutil.rmtree",
        f"{_ENGINE}/launch/watchdog/sidecar.py": "shutil.rmtree",
        f"{_ENGINE}/launch/watchdog/sidecar_client.py": "TemporaryDirectory",
        f"{_ENGINE}/run_folder/records.py": "TemporaryDirectory mkdir write_text",
        f"{_ENGINE}/runtime/cuda_libraries.py": "TemporaryDirectory mkdir symlink_to",
        f"{_ENGINE}/estimate/calibration/gpu_clock.py": "TemporaryDirectory",
        f"{_ENGINE}/estimate/calibration/on_ranks.py": "TemporaryDirectory touch write_text",
        f"{_ENGINE}/estimate/calibration/timed_run.py": "TemporaryDirectory",
        f"{_INDEXED}/preparation/near_duplicates.py": "TemporaryFile",
        "plugins/observer/profiler/src/megatron_run_observer_profiler/window.py": (
            "TemporaryDirectory _dump_snapshot export_chrome_trace write_text"
        ),
    },
}


def writings(tree: ast.AST) -> Iterator[str]:
    """What ``tree`` writes, names or removes by itself, by the function that does so."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            yield from ({alias.name for alias in node.names} & MODULES[node.module])
        elif isinstance(node, ast.Call):
            yield from _written_by(node)


def _written_by(call: ast.Call) -> Iterator[str]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name not in _LOOKED_AT:
        return
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if owner in MODULES:
        if name in MODULES[owner] | NAMES or (name == "open" and not _only_reads(call)):
            yield f"{owner}.{name}"
    elif name in NAMES or (name in ("open", "ZipFile") and _for_writing(call)):
        yield name
    elif name == "replace" and owner and len(call.args) == 1 and not call.keywords:  # that of a text takes two
        yield "Path.replace"


def _only_reads(call: ast.Call) -> bool:
    """Whether the flags of an ``os.open`` are known, and none of them writes."""
    flags = call.args[1] if len(call.args) > 1 else None
    return flags is not None and all(
        ast.unparse(each).removeprefix("os.") in READING
        for each in ast.walk(flags)
        if isinstance(each, ast.Attribute | ast.Name) and ast.unparse(each) != "os"
    )


def _for_writing(call: ast.Call) -> bool:
    """Whether a file is opened in a mode that writes, or in one that the source does not tell."""
    is_method = isinstance(call.func, ast.Attribute) and call.func.attr == "open"
    places = call.args if is_method else call.args[1:]
    if is_method and len(places) > 1:  # a name, and flags: that of SafeFolder
        return False
    modes = [*places[:1], *(each.value for each in call.keywords if each.arg == "mode")]
    constants = [each.value for each in modes if isinstance(each, ast.Constant)]
    return len(constants) < len(modes) or any(set("wax+") & set(str(each)) for each in constants)


def test_what_writes_goes_one_of_two_ways() -> None:
    """A writer of its own follows a link out of a run folder, or leaves a torso where it is killed."""
    found = {
        file.relative_to(ROOT).as_posix(): " ".join(sorted(set(writings(ast.parse(file.read_text("utf-8"))))))
        for file in SOURCES
        if "testing" not in file.parts
    }
    allowed = {file: names for files in ALLOWED.values() for file, names in files.items()}
    assert {file: names for file, names in found.items() if names != allowed.get(file, "")} == {}
    assert sorted(allowed.keys() - found.keys()) == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("open(path, 'w')", "open"),
        ("open(path, mode='a')", "open"),
        ("open(path, mode)", "open"),
        ("path.open('xb')", "open"),
        ("path.open('r+b')", "open"),
        ("os.open(path, os.O_WRONLY | os.O_CREAT)", "os.open"),
        ("os.open(path, flags)", "os.open"),
        ("path.write_text(text)", "write_text"),
        ("path.replace(other)", "Path.replace"),
        ("os.replace(path, other)", "os.replace"),
        ("from shutil import copytree", "copytree"),
        ("shutil.move(path, other)", "shutil.move"),
        ("json.dump(content, file)", "json.dump"),
        ("tempfile.mkdtemp()", "mkdtemp"),
        ("np.save(path, array)", "np.save"),
        ("ZipFile(path, 'w')", "ZipFile"),
    ],
)
def test_a_writer_is_found(source: str, name: str) -> None:
    assert list(writings(ast.parse(source))) == [name]


@pytest.mark.parametrize(
    "source",
    [
        "path.open('rb')",
        "open(path, encoding='utf-8')",
        "os.open(path, os.O_RDONLY | os.O_NOFOLLOW)",
        "text.replace('a', 'b')",
        "replace(run, folder=None)",
        "os.fdopen(handle, 'wb')",
        "folder.open(name, os.O_WRONLY)",
        "files.replace(name, content)",
        "shutil.copyfileobj(source, target)",
    ],
)
def test_other_calls_are_none(source: str) -> None:
    assert not list(writings(ast.parse(source)))
