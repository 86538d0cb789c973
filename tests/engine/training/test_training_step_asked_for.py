"""A step that ``--resume`` asks for by its number, as a launcher looks for it."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from megatron_run.config.request import Request
from megatron_run.errors import CheckpointError
from megatron_run.planning import resolve
from megatron_run_engine.training.state.init_from import check_source


def test_a_launcher_names_the_steps_in_memory_before_it_starts_ranks(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    sets = {"run.folder": str(tmp_path), "checkpoint.memory_interval": 2}
    asked = resolve(Request(configs=("preset:tiny",), values=sets, resume="6"))
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*step6; no step is saved there$"):
        check_source(asked)
    with (
        mock.patch("megatron_run_engine.training.state.init_from.newest_in_memory", return_value=8),
        pytest.raises(CheckpointError, match=r"step 6 is not on disk, .* step 8, the newest .*: --resume auto$"),
    ):
        check_source(asked)
