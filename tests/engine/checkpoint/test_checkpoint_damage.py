"""Whatever is wrong with a saved step is found before anything of it is used, and the file is named."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_run.errors import CheckpointError, ExitCode
from megatron_run_engine.checkpoint.manifest import read_manifest
from megatron_run_engine.checkpoint.step_folder import Checkpoints, verify_files
from tests.support.saved_steps import random_state, save_alone

SHARD, MANIFEST = "rank-00000.safetensors", "manifest.json"


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoints:
    save_alone(tmp_path / "c", 1, random_state(1, tensors=2))
    return save_alone(tmp_path / "c", 2, random_state(2, tensors=2))


def refused(saved: Checkpoints, step: int = 2, *, fast: bool = False) -> str:
    with pytest.raises(CheckpointError) as error:
        verify_files(saved.folder(step), (manifest := saved.manifest(step)), manifest.files, fast=fast)
    assert error.value.exit_code == ExitCode.DATA
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("fast", [False, True])
def test_a_thousand_flipped_bytes_are_found_each_by_the_name_of_its_file(saved: Checkpoints, fast: bool) -> None:
    """By the SHA-256, and by the hash that is compared when a run resumes."""
    draw, found = random.Random(0), 0
    files = [saved.folder(2) / name for name in (SHARD, MANIFEST)]
    for _ in range(1000):
        file = draw.choice(files)
        with file.open("r+b", buffering=0) as content:
            place = draw.randrange(file.stat().st_size)
            (byte,) = os.pread(content.fileno(), 1, place)
            os.pwrite(content.fileno(), bytes([byte ^ draw.randint(1, 255)]), place)
            found += str(file) in refused(saved, fast=fast)
            os.pwrite(content.fileno(), bytes([byte]), place)
    assert found == 1000
    saved.verify(2)


def drop_fast_hash(content: dict[str, Any]) -> None:
    del content["files"][SHARD]["xxh3"]


def test_a_step_of_version_1_has_no_fast_hash_and_is_verified_by_its_sha_256(saved: Checkpoints) -> None:
    assert saved.manifest(2).version == 2
    forge(saved, drop_fast_hash)
    assert "has no XXH3" in refused(saved)
    forge(saved, lambda content: content.update(version=1))
    manifest, file = saved.manifest(2), saved.folder(2) / SHARD
    verify_files(saved.folder(2), manifest, manifest.files, fast=True)
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert "SHA-256" in refused(saved, fast=True)


def test_a_step_of_a_later_version_is_answered_with_what_to_do(saved: Checkpoints) -> None:
    forge(saved, lambda content: content.update(version=3, unknown={}))
    message = refused(saved)
    assert "its version is 3" in message
    assert message.endswith("upgrade megatron-run")


@pytest.mark.parametrize("name", [SHARD, MANIFEST])
@pytest.mark.parametrize("change", [lambda text: text[:-1], lambda text: text + b" ", lambda text: b""])
def test_another_length_is_found(saved: Checkpoints, name: str, change: Callable[[bytes], bytes]) -> None:
    file = saved.folder(2) / name
    file.write_bytes(change(file.read_bytes()))
    assert str(file) in refused(saved)
    assert not saved.looks_whole(2)


@pytest.mark.parametrize("name", [SHARD, MANIFEST])
def test_a_missing_file_is_named(saved: Checkpoints, name: str) -> None:
    (saved.folder(2) / name).unlink()
    assert refused(saved) == f"{saved.folder(2) / name} cannot be read: No such file or directory"


@pytest.mark.parametrize("name", [SHARD, MANIFEST])
def test_a_link_or_a_folder_in_the_place_of_a_file_is_refused(saved: Checkpoints, name: str, tmp_path: Path) -> None:
    file = saved.folder(2) / name
    file.rename(tmp_path / "moved")
    file.symlink_to(tmp_path / "moved")
    assert refused(saved) == f"{file} cannot be read: it is a symbolic link"
    file.unlink()
    file.mkdir()
    assert refused(saved) == f"{file} cannot be read: it is not a file"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [SHARD, MANIFEST])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(saved: Checkpoints, name: str) -> None:
    """Opening one for reading blocks until somebody writes: nobody will."""
    file = saved.folder(2) / name
    file.unlink()
    os.mkfifo(file)
    assert not saved.looks_whole(2)  # first, since it reads in this thread, which the time limit can end
    assert refused(saved) == f"{file} cannot be read: it is not a file"


def test_a_shard_of_another_step_is_found(saved: Checkpoints) -> None:
    foreign, mine = saved.folder(1) / SHARD, saved.folder(2) / SHARD
    mine.write_bytes(foreign.read_bytes())
    assert f"{mine} is damaged" in refused(saved)


def test_a_step_under_another_name_is_found(saved: Checkpoints) -> None:
    saved.folder(2).rename(saved.folder(3))
    assert refused(saved, 3) == f"{saved.folder(3)} is not what its name says: it holds step 2"


def test_a_step_that_is_not_there_is_answered_with_those_that_are(saved: Checkpoints) -> None:
    assert refused(saved, 5) == f"there is no checkpoint {saved.folder(5)}; saved steps: 1, 2"


@pytest.mark.parametrize("text", ["", "step", "step02", "../step2", "\0\0\0", "step99999999999999999999", "x" * 1000])
def test_garbage_in_latest_says_nothing_and_the_steps_are_the_truth(saved: Checkpoints, text: str) -> None:
    (saved.path / "latest").write_text(text)
    assert saved.hint() is None
    assert saved.newest() == 2


def test_a_newest_step_that_vanished_is_not_passed_over_in_silence(saved: Checkpoints) -> None:
    saved.folder(2).rename(saved.path / "gone")
    with pytest.raises(CheckpointError, match="step2 is missing") as error:
        saved.newest()
    assert "to resume from step 1: --resume 1" in str(error.value)


def test_without_steps_there_is_no_newest(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "nothing").newest() is None


class Explosive:
    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return print, ("executed",)


@pytest.mark.parametrize("name", [SHARD, MANIFEST])
def test_a_pickle_is_refused_and_not_executed(
    saved: Checkpoints, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (saved.folder(2) / name).write_bytes(pickle.dumps(Explosive()))
    refused(saved)
    assert not capsys.readouterr().out


def forge(saved: Checkpoints, change: Callable[[dict], None]) -> Path:  # type: ignore[type-arg]
    """Change the manifest of step 2 as somebody would who also makes its SHA-256 right."""
    path = saved.folder(2) / MANIFEST
    content = json.loads(path.read_text())["manifest"]
    change(content)
    write_forged(path, json.dumps(content).encode())
    return path


def write_forged(path: Path, body: bytes) -> None:
    digest = hashlib.sha256(body).hexdigest()
    path.write_bytes(b'{"manifest":' + body + b',\n"sha256":"' + digest.encode() + b'"}\n')


@pytest.mark.parametrize(
    "name", ["../step1/rank-00000.safetensors", "/etc/passwd", ".hidden", "", "a/b", "a\nb", "rank-00000.safetensors\n"]
)
def test_a_path_in_a_manifest_is_refused(saved: Checkpoints, name: str) -> None:
    forge(saved, lambda content: content["files"].update({name: content["files"].pop(SHARD)}))
    assert "cannot be used: files" in refused(saved)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda content: content.update(version=0), "version"),
        (lambda content: content.update(more=1), "more"),
        (lambda content: content.pop("about"), "about"),
        (lambda content: content["about"].update(step="2"), "about.step"),
        (lambda content: content["about"].update(step=-2), "about.step"),
        (lambda content: content["about"]["counters"].update(consumed_samples=-1), "about.counters"),
        (lambda content: content["about"]["counters"].update(consumed_samples=10**30), "about.counters"),
        (lambda content: content["about"].update(losses=[float("nan")]), "about.losses"),
        (lambda content: content["about"].update(scaler={"scale": float("inf")}), "about.scaler"),
        (lambda content: content["about"]["topology"].update(world=-1), "about.topology"),
        (lambda content: content["files"].clear(), "is in no file of the step"),
        (lambda content: master(content).update(dtype="X1"), "dtype"),
        (lambda content: master(content).update(shape=[10**9, 10**9]), "do not fit the shape"),
        (lambda content: master(content)["pieces"].clear(), "are in no piece"),
        (lambda content: master(content)["pieces"].extend(master(content)["pieces"]), "hold the same values"),
    ],
)
def test_a_manifest_that_lies_is_refused(saved: Checkpoints, change: Callable[[dict], None], why: str) -> None:  # type: ignore[type-arg]
    path = forge(saved, change)
    said = refused(saved)
    assert said.startswith(f"{path} cannot be used: ")
    assert why in said


def master(content: dict) -> dict:  # type: ignore[type-arg]
    field: dict = content["tensors"]["layers.0.weight"]["master"]  # type: ignore[type-arg]
    return field


@pytest.mark.parametrize(
    "body", [b"", b"[" * 100_000, b"null", b"{", b"1" * 5000, b'"\xff"', b"NaN", b"!!python/object"]
)
def test_a_manifest_that_is_no_manifest_is_refused(saved: Checkpoints, body: bytes) -> None:
    write_forged(saved.folder(2) / MANIFEST, body)
    assert "cannot be used" in refused(saved)


def test_the_manifest_is_json_that_any_tool_reads(saved: Checkpoints) -> None:
    content = json.loads((saved.folder(2) / MANIFEST).read_text())
    assert content["manifest"]["about"]["step"] == 2
    assert read_manifest(saved.folder(2)).encode() == (saved.folder(2) / MANIFEST).read_bytes()


def test_of_the_older_steps_the_newest_that_looks_whole_is_offered(tmp_path: Path) -> None:
    for step in range(1, 5):
        saved = save_alone(tmp_path / "c", step, random_state(step, tensors=2), keep=9)
    (saved.folder(3) / SHARD).write_bytes(b"")

    def offered(step: int, fix: str = "") -> str:
        with pytest.raises(CheckpointError) as error, saved.offering_older(step, "take step {}".format, "begin"):
            raise CheckpointError("damaged", fix=fix)
        return error.value.fix

    assert [offered(step) for step in (4, 3, 2, 1)] == ["take step 2", "take step 2", "take step 1", "begin"]
    assert offered(4, fix="read the manual") == "read the manual"
