"""Data that differs among the ranks ends a training before its first step, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_run.errors import ExitCode
from tests.support.forked import run_forked, tiny

SOURCE = """
import os

import numpy as np
from pydantic import BaseModel, ConfigDict

from megatron_run.contracts import DataSource, PluginInfo
from megatron_run.hookspecs import hookimpl


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    vocab_size: int = 50


class Ranked(DataSource):
    vocab_size = 50

    def dataset(self, split, sequence_length, seed):
        rank = int(os.environ["RANK"])
        mask = np.ones(sequence_length, np.float32)
        row = lambda index: (index + np.arange(sequence_length)) % 50
        return [{{"tokens": row({start}), "labels": row({start} + 1), "loss_mask": mask}} for index in range({count})]


@hookimpl
def megatron_run_plugin_info():
    return PluginInfo("data", "ranked", options=Options)


@hookimpl
def megatron_run_create_data():
    return Ranked()
"""


@pytest.mark.parametrize(
    ("start", "count", "difference"),
    [
        ("index", "64 - rank", "split train has 63 samples on rank 1 and 64 on rank 0, and each rank takes its share"),
        ("index + rank", "64", "samples of split train on rank 1 are not those on rank 0, and each rank takes"),
        ("index", "64 + (split == 'validation') * rank", "split validation has 65 samples on rank 1 and 64 on rank 0"),
    ],
)
def test_data_of_the_rank_is_refused_in_one_line(start: str, count: str, difference: str, tmp_path: Path) -> None:
    file = tmp_path / "ranked.py"
    file.write_text(SOURCE.format(start=start, count=count))
    ran = run_forked(tiny(tmp_path / "run", plugins=[f"data={file}"], nproc=2))
    assert ran.code == ExitCode.DATA, ran.message
    assert ran.message.startswith(f"the ranks do not read the same data: {difference}")
    assert f"megatron-run plugins check data={file}" in ran.message
    assert "\n" not in ran.message


def test_data_that_is_the_same_is_trained_on(tmp_path: Path) -> None:
    file = tmp_path / "ranked.py"
    file.write_text(SOURCE.format(start="index", count="64"))
    ran = run_forked(tiny(tmp_path / "run", plugins=[f"data={file}"], nproc=2))
    assert ran.code == ExitCode.DONE, ran.message
