"""A value that means what another one did refuses neither a resumed run nor a start from weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast, get_args, get_origin
from unittest import mock

import pytest
from pydantic import BaseModel, ValidationError

from megatron_run.config.fields import meanings, walk
from megatron_run.config.values import flat, members
from megatron_run.contracts.meaning import NOT_LEARNED
from megatron_run.contracts.model import MAX_LAYERS
from megatron_run.contracts.option_groups import SaysExplicit
from megatron_run.planning import ResolvedRun
from megatron_run.registry.discover import scan
from megatron_run.registry.load import load
from megatron_run_engine.builtin.model.expert_options import ExpertOptions
from megatron_run_engine.run_folder.changes import find_changes, identity
from megatron_run_engine.run_folder.idle_options import idle_keys
from megatron_run_engine.training.state.init_from import differing_options
from tests.support.changed_options import changed
from tests.support.resolving import TINY, resolved

SIZES = {"num_layers": 4, "hidden_size": 16, "num_heads": 2}
LATENT = {"kv_rank": 8, "rope_head_size": 2, "nope_head_size": 4, "value_head_size": 4}
EXPERTS = {"experts": {"count": 4, "top_k": 2}}
#: Models with much and with little in use. Each installed model has a row.
BASES: Mapping[str, Mapping[str, Any]] = {
    "gpt": {},
    "gpt with experts": {**EXPERTS, "position": "rope", "num_kv_heads": 1, "ffn_size": 64},
    "bert": {},
    "bert with classes": {"head": "classification", "ffn_size": 64},
    "t5": {},
    "deepseek": LATENT,
    "deepseek with experts": {**LATENT, **EXPERTS},
}


def others(annotation: object, value: Any, meant: Any) -> Iterator[Any]:
    """Values beside ``value`` that a field may have, what it is ``meant`` to be among them."""
    yield meant
    for member in members(annotation):
        if member is bool:
            yield not value
        elif member in (int, float):
            yield from (1, 2 * (value or 1), (value or 1) / 2 if member is float else 3)
        elif get_origin(member) is Literal:
            yield from get_args(member)
        elif member is type(None):
            yield None
        elif isinstance(value, tuple):
            yield from ((1,), (0, 1), (1, 1, 1, 1))


def with_model(run: ResolvedRun, options: BaseModel) -> ResolvedRun:
    """``run`` with other options of its model."""
    section = run.config.model.model_copy(update={"options": options.model_dump(mode="json")})
    plugins = {**run.plugins, "model": (run.one("model").with_options(options),)}
    return replace(run, config=run.config.model_copy(update={"model": section}), plugins=plugins)


def test_each_installed_model_has_a_row_and_says_what_its_options_mean() -> None:
    installed = {entry.name: load(entry, "").options_model for entry in scan().of_kind("model")}
    assert installed.keys() == {name.partition(" ")[0] for name in BASES}
    assert [name for name, model in installed.items() if not callable(getattr(model, "explicit", None))] == []


#: Of by day the other row has the same options in use.
BY_NIGHT = {"deepseek with experts"}


@pytest.mark.parametrize(
    "base", [pytest.param(each, marks=[pytest.mark.nightly] * (each in BY_NIGHT)) for each in BASES]
)
def test_a_value_that_changes_nothing_of_what_options_mean_is_no_change(base: str) -> None:
    """For every option, and values of each type; a value that does change something is told."""
    use = base.partition(" ")[0]
    before = resolved(TINY, {"model": {"use": use, **SIZES, **BASES[base]}})
    options = cast("Any", before.one("model").options)
    meant, values, idle = options.explicit(), flat(options.model_dump()), 0
    for key, field in walk(type(options)):
        name = ".".join(key)
        for other in others(field.annotation, values.get(name), meant.get(name)):
            try:
                now = changed(options, {name: other})
            except (ValidationError, TypeError):
                continue  # not together with the others
            same = now.explicit() == meant
            found = [change.key for change in find_changes(identity(before), with_model(before, now))]
            wanted = [] if same or NOT_LEARNED in meanings(field) else [f"model.{name}"]
            assert found == wanted, f"{name}={other}"
            idle += same and other != values.get(name)
    assert idle, "the test would see nothing"


def test_several_values_that_change_nothing_together_are_no_change() -> None:
    before = resolved(TINY, {"model": {"use": "gpt", **EXPERTS}}, sets={"model.experts.layer_freq": 2})
    now = resolved(TINY, {"model": {"use": "gpt", **EXPERTS}}, sets={"model.experts.layer_pattern": [1, 0]})
    assert find_changes(identity(before), now) == ()


def test_beside_a_change_the_options_that_nothing_reads_are_not_told() -> None:
    before, now = resolved(), resolved(sets=("model.experts.top_k=3", "model.ffn_size=48"))
    assert [change.key for change in find_changes(identity(before), now)] == ["model.ffn_size"]


def test_weights_may_have_had_other_values_that_nothing_reads() -> None:
    now = resolved(sets=("model.experts.top_k=3",))
    saved = identity(resolved())
    step = SimpleNamespace(manifest=lambda _: SimpleNamespace(about=SimpleNamespace(identity=saved)), folder=Path)
    assert differing_options(now, cast("Any", step), cast("Any", "step3")) == ""


FILE = """
from pydantic import BaseModel, ConfigDict, Field
from megatron_run import PluginInfo, hookimpl

class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    rate: float | None = Field(None, description="unset: 0.5")

    def explicit(self):
        return {"rate": 0.5 if self.rate is None else self.rate}

@hookimpl
def megatron_run_create_scaler(context, options):
    return None

@hookimpl
def megatron_run_plugin_info():
    return PluginInfo("scaler", "mine", options=Options)
"""


def test_options_of_any_kind_may_say_what_they_mean(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    unset, same, other = (resolved(TINY, {"scaler": {"use": str(file), "rate": rate}}) for rate in (None, 0.5, 1.0))
    assert isinstance(unset.one("scaler").options, SaysExplicit)
    assert find_changes(identity(unset), same) == find_changes(identity(same), unset) == ()
    assert [change.key for change in find_changes(identity(unset), other)] == ["scaler.rate"]


def test_what_the_saved_options_cannot_be_here_is_a_change() -> None:
    run = resolved()
    assert idle_keys({**identity(run), "model.activation": "none"}, run, ["model.activation"]) == frozenset()


def test_more_layers_than_can_be_planned_are_another_model_and_nothing_is_as_long() -> None:
    """A record that somebody has changed may name any number."""
    run = resolved(TINY, sets={"model.experts.count": 4})
    with mock.patch.object(ExpertOptions, "layers", autospec=True, side_effect=ExpertOptions.layers) as listed:
        assert idle_keys({"model.num_layers": MAX_LAYERS + 1}, run, {"model.num_layers"}) == frozenset()
        assert idle_keys({"model.num_layers": MAX_LAYERS}, run, {"model.num_layers"}) == frozenset()
    asked = [call.args[1] for call in listed.call_args_list]
    assert asked == [4, 4, MAX_LAYERS], "once for each meaning"
