"""Where texts end: what a folder says, as transformers reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_run.errors import CheckpointError
from megatron_run_engine.formats.end_tokens import end_tokens, sampling_defaults


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"config.json": {"eos_token_id": 3}}, (3,)),
        ({"config.json": {"eos_token_id": 3}, "generation_config.json": {"eos_token_id": [1, 106]}}, (1, 106)),
        ({"config.json": {"eos_token_id": 3}, "generation_config.json": {}}, None),
    ],
)
def test_generation_config_says_it_before_config(
    tmp_path: Path, files: dict[str, object], expected: tuple[int, ...] | None
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert end_tokens(tmp_path) == expected


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"eos_token_id": "</s>"}', "eos_token_id is '</s>', and must be an id or a list of ids"),
        ('{"eos_token_id": [1, true]}', r"eos_token_id is \[1, True\], and must be"),
        ('{"eos_token_id": 1', "generation_config.json cannot be used: "),
    ],
)
def test_what_is_no_id_is_one_line(tmp_path: Path, content: str, why: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=why):
        end_tokens(tmp_path)


def test_the_defaults_of_sampling_are_those_that_are_said(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    said = {"repetition_penalty": 1.05, "top_k": 20, "top_p": None, "temperature": 0.7, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert sampling_defaults(tmp_path) == {"repetition_penalty": 1.05, "top_k": 20}
    (tmp_path / "generation_config.json").write_text('{"top_p": "high"}')
    with pytest.raises(CheckpointError, match="top_p is 'high', and must be a number"):
        sampling_defaults(tmp_path)
