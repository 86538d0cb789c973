"""The README of optimizer=deepspeed: every row of its tables is tried, and every key of its sections is there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest

from megatron_run.config.request import Request
from megatron_run.planning import resolve
from tests.support.checkout import ROOT
from tests.support.ranks import run_ranks

PAGE = ROOT / "plugins" / "optimizer" / "deepspeed" / "README.md"
#: A key with its value, what to set instead, and a note; or keys without a counterpart, and why.
MAPPED_ROW = re.compile(r"^\| `(?P<key>[\w.]+): (?P<value>[^`]+)` \| `(?P<set>[^`]+)` \|(?: (?P<note>[^|]+))? \|$")
NONE_ROW = re.compile(r"^\| (?P<keys>`[\w.]+`(?:, `[\w.]+`)*) \| (?P<note>[^|]+) \|$")
#: What becomes of a value that is not the same number here; learning rates are those of the page's rows.
BECOMES: dict[str, Callable[[Any], Any]] = {
    "optimizer.type": str.lower,
    "scheduler.type": {"WarmupCosineLR": "cosine"}.__getitem__,
    "scheduler.params.cos_min_ratio": lambda ratio: ratio * 0.001,
    "bf16.enabled": {True: "bf16"}.__getitem__,
    "fp16.enabled": {True: "fp16"}.__getitem__,
    "fp16.initial_scale_power": lambda power: 2**power,
}
#: DeepSpeed's keys outside the sections whose fields are known.
LOOSE = {
    "optimizer.type",
    "scheduler.type",
    *(f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay")),
}


class Row(NamedTuple):
    key: str
    value: Any
    set: str | None
    note: str


def rows() -> list[Row]:
    found: list[Row] = []
    tables = PAGE.read_text(encoding="utf-8").partition("\n## Keys of a ds_config.json with")[2]
    for line in (line for line in tables.splitlines() if line.startswith("| `")):
        if mapped := MAPPED_ROW.match(line):
            found.append(Row(mapped["key"], json.loads(mapped["value"]), mapped["set"], mapped["note"] or ""))
        else:
            none = NONE_ROW.match(line)
            assert none, line
            found += [Row(key, None, None, none["note"]) for key in re.findall(r"`([\w.]+)`", none["keys"])]
    return found


MAPPED = {row.key: row for row in rows() if row.set}


@pytest.mark.parametrize("key", MAPPED)
def test_a_row_sets_what_deepspeed_would_have(key: str) -> None:
    row = MAPPED[key]
    assert row.set is not None
    section, option = row.set.partition("=")[0].split(".")
    sets = ("train.steps=2000", *(("train.precision=fp16",) if section == "scaler" else ()), row.set)
    run = resolve(Request(configs=("preset:tiny",), plugins=("optimizer=deepspeed",), sets=sets))
    values = run.one(section).options if section in ("optimizer", "scaler") else getattr(run.config, section)
    wanted, found = BECOMES.get(key, lambda value: value)(row.value), getattr(values, option)
    if isinstance(found, tuple | float):
        assert found == pytest.approx(tuple(wanted) if isinstance(found, tuple) else wanted)
    else:
        assert str(found) == str(wanted)


def test_keys_without_a_counterpart_say_why_and_no_key_comes_twice() -> None:
    assert all(row.note for row in rows() if row.set is None)
    keys = [row.key for row in rows()]
    assert sorted(set(keys)) == sorted(keys)


def known_keys(rank: int, world: int) -> tuple[set[str], set[str]]:
    """DeepSpeed's keys in the sections that the page shows whole, and all words that other sections are made of."""
    from deepspeed.runtime import constants, lr_schedules, precision_config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": precision_config.DeepSpeedBF16Config,
        "fp16": precision_config.DeepSpeedFP16Config,
    }
    whole = {
        f"{name}.{field.alias or key}" for name, model in models.items() for key, field in model.model_fields.items()
    }
    words = {value for module in (constants, lr_schedules) for value in vars(module).values() if isinstance(value, str)}
    return whole, words


@pytest.mark.nightly  # importing DeepSpeed takes seconds; by day every row is tried, and no key comes twice
@pytest.mark.multiproc
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_the_keys_are_deepspeeds_and_its_sections_are_whole() -> None:
    ((whole, words),) = run_ranks(known_keys, 1)
    shown = {row.key for row in rows()}
    sections = tuple({f"{key.partition('.')[0]}." for key in whole})
    assert {key for key in shown if key.startswith(sections)} == whole
    others = {key for key in shown if not key.startswith(sections)} - LOOSE
    assert {word for key in others for word in key.split(".")} <= words
