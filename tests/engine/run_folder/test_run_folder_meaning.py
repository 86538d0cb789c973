"""What an option's field says of itself decides what a run that goes on, or starts from weights, may change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_run.config.fields import meanings, walk
from megatron_run.config.values import flat
from megatron_run.contracts.meaning import FIXED, FREE_OF_WEIGHTS, LEARNED, NOT_LEARNED, OF_NEW_PART, OF_TRAINING
from megatron_run.contracts.schema import SECTIONS
from megatron_run.errors import Problems
from megatron_run.planning import ResolvedRun
from megatron_run.registry.discover import scan
from megatron_run.registry.load import load
from megatron_run_engine.run_folder.changes import find_changes, identity, with_added_options
from megatron_run_engine.training.state.init_from import differing_options
from tests.support.resolving import TINY, resolved

MODEL = """
from typing import Annotated, ClassVar

from pydantic import Field

from megatron_run import PluginInfo, hookimpl
from megatron_run.contracts.option_groups import Group
from megatron_run.contracts.meaning import FREE_OF_WEIGHTS, NOT_LEARNED, OF_NEW_PART, OF_TRAINING
from megatron_run_engine.builtin.model.gpt import Gpt, GptOptions


class Tuning(Group):
    tiles: Annotated[int, NOT_LEARNED] = Field(1, description="pieces of a product")
    noise: Annotated[float, OF_TRAINING] = Field(0.0, description="in trainings")
    reach: Annotated[float, FREE_OF_WEIGHTS] = Field(1.0, description="of positions")
    answers: Annotated[int, OF_NEW_PART] = Field(2, description="of the head")
    width: int = Field(4, description="of matrices")


class Options(GptOptions):
    tuning: Tuning = Field(Tuning(), description="of a third party")
    extra: Tuning | None = Field(None, description="a group that may be absent")
    table: Annotated[dict[str, int], NOT_LEARNED] = Field({}, description="entries")


@hookimpl
def megatron_run_plugin_info():
    return PluginInfo("model", "mine", options=Options)


@hookimpl
def megatron_run_create_model(context, options):
    return Gpt(context, options)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MODEL)
    return str(tmp_path / "mine.py")


def changes(model: str, **tuning: Any) -> tuple[Any, ...]:
    before, now = (resolved(TINY, {"model": {"use": model, "tuning": given}}) for given in ({}, tuning))
    return find_changes(identity(before), now)


def test_a_third_partys_option_says_whether_a_resumed_run_may_change_it(model: str) -> None:
    assert changes(model, tiles=2) == ()
    for free in ("noise", "reach"):
        (change,) = changes(model, **{free: 0.5})
        assert (change.key, change.fixed) == (f"model.tuning.{free}", False)
    for fixed in ("answers", "width"):
        (change,) = changes(model, **{fixed: 8})
        assert (change.key, change.fixed) == (f"model.tuning.{fixed}", True)


def test_a_third_partys_option_says_whether_weights_may_have_had_another(model: str) -> None:
    now = resolved(TINY, {"model": {"use": model}})
    saved = {**identity(now), "model.tuning.noise": 0.5, "model.tuning.reach": 0.5, "model.tuning.answers": 5}
    assert differing_options(now, cast("Any", _Checkpoints(saved)), 3).count(" there, ") == 3
    with pytest.raises(Exception, match=r"another model: model\.tuning\.width=5 there, 4 here"):
        differing_options(now, cast("Any", _Checkpoints({**saved, "model.tuning.width": 5})), 3)


class _Checkpoints:
    """A step with an identity."""

    def __init__(self, identity: Mapping[str, Any]) -> None:
        self._identity = identity

    def manifest(self, _: int) -> Any:
        return SimpleNamespace(about=SimpleNamespace(identity=self._identity))

    def folder(self, step: int) -> Path:
        return Path(f"step{step}")


def marked(run: ResolvedRun, mark: object) -> set[str]:
    sections = {name: SECTIONS[name] for name in LEARNED if name in SECTIONS}
    models = {"model": run.one("model").options_model, "optimizer": run.one("optimizer").options_model} | sections
    return {f"{name}.{'.'.join(key)}" for name, each in models.items() for key, f in walk(each) if mark in meanings(f)}


def test_the_marks_of_what_is_built_in() -> None:
    """A promise to runs that exist: a mark changes only on purpose."""
    run = resolved(plugins=["optimizer=zero1"])
    rope = ("theta", "scaling", "factor", "original_length", "low_freq", "high_freq", "attention_factor")
    assert marked(run, FREE_OF_WEIGHTS) == {f"model.rope.{name}" for name in (*rope, "short_factors", "long_factors")}
    assert marked(run, NOT_LEARNED) == {
        *(f"train.{name}" for name in ("max_skips", "recompute", "offload", "count_zeros")),
        *(
            f"optimizer.{name}"
            for name in ("bucket_size", "overlap_grad_reduce", "state_on_host", "overlap_param_gather")
        ),
        *(f"model.{name}" for name in ("loss_chunks", "experts.dispatcher", "experts.pad_to_capacity")),
    }
    assert marked(run, OF_TRAINING) == {
        *(f"model.{name}" for name in ("dropout", "init_std", "label_smoothing", "attention.qk_clip")),
        *(f"model.experts.{name}" for name in ("aux_loss_coeff", "z_loss_coeff")),
    }
    assert marked(run, FIXED) == {"train.sequence_length", "optimizer.rule"}
    assert marked(resolved(TINY, {"model": {"use": "bert", "norm": {"order": "post"}}}), OF_NEW_PART) == {
        f"model.{name}" for name in ("head", "classes", "choices", "max_positions")
    }


def test_an_option_of_a_derived_model_says_again_what_it_means() -> None:
    models: list[Any] = [load(entry, "").options_model for entry in scan().entries]
    models += [field.annotation for model in models for field in model.model_fields.values()]
    lost = [
        f"{model.__name__}.{name}"
        for model in models
        for base in getattr(model, "__mro__", ())[1:]
        for name, field in getattr(base, "model_fields", {}).items()
        if name in model.model_fields and meanings(field) != meanings(model.model_fields[name])
    ]
    assert lost == []


def test_the_default_of_a_group_is_the_groups_own() -> None:
    """Setting one key of a group leaves the others at the group's defaults, which must be those of an unset group."""
    wrong = [
        f"{entry}: {name}"
        for entry in scan().entries
        for name, field in load(entry, "").options_model.model_fields.items()
        if hasattr(field.default, "model_dump") and field.default != type(field.default)()
    ]
    assert wrong == []


def test_a_whole_identity_is_flat() -> None:
    found = identity(resolved(sets=["model.experts.count=4"]))
    assert found["model.experts.count"] == 4
    assert flat(found) == found


def test_a_group_that_was_absent_is_no_added_option(model: str) -> None:
    before, now = (resolved(TINY, {"model": {"use": model, **extra}}) for extra in ({}, {"extra": {"width": 8}}))
    found = find_changes(with_added_options(identity(before), now), now)
    assert ("model.extra.width", None, 8, True) in [tuple(change) for change in found]


def test_a_mark_counts_for_the_entries_of_a_mapping(model: str) -> None:
    before, now = (resolved(TINY, {"model": {"use": model, "table": {"x": size}}}) for size in (1, 2))
    assert find_changes(identity(before), now) == ()


def test_an_option_that_has_got_a_mark_since_is_no_change(model: str) -> None:
    now = resolved(TINY, {"model": {"use": model}})
    assert find_changes({**identity(now), "model.tuning.tiles": 1}, now) == ()


def test_a_group_with_a_default_of_its_own_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(MODEL.replace("= Field(Tuning(), ", "= Field(Tuning(width=8), "))
    with pytest.raises(Problems, match="whose group tuning has a default of its own"):
        resolved(TINY, {"model": {"use": str(file)}})
