"""A step of adapters names a folder of the reader's, and what is there may be anything."""

from __future__ import annotations

import hashlib
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_run.errors import CheckpointError
from megatron_run_engine.checkpoint.adapted import find_base
from megatron_run_engine.checkpoint.manifest import MANIFEST, AdaptersRecord
from tests.support.saved_steps import random_state, save_alone


def _hole(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 28)


@pytest.mark.parametrize("place", [os.mkfifo, Path.mkdir, _hole, lambda path: path.symlink_to("/dev/zero")])
def test_a_base_whose_manifest_is_something_else_is_gone(tmp_path: Path, place: Callable[[Path], None]) -> None:
    save_alone(tmp_path / "base", 1, random_state(1, tensors=2))
    manifest = tmp_path / "base" / "step1" / MANIFEST
    sha256 = hashlib.sha256(manifest.read_bytes()).hexdigest()
    base = str(tmp_path / "base" / "step1")
    record = AdaptersRecord(name="lora", down="down", up="up", rank=2, scale=1.0, base=base, sha256=sha256)
    assert find_base(record, tmp_path)[1] == 1
    manifest.unlink()
    place(manifest)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"the weights that .* adapts are not in"):
            find_base(record, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()
