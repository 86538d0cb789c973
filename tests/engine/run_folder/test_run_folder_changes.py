"""What identifies a run, across versions whose models have more options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_run.errors import InputError
from megatron_run_engine.run_folder import check_run_folder
from megatron_run_engine.run_folder.changes import find_changes, identity, with_added_options
from tests.support.resolving import resolved


def test_options_that_a_later_version_added_are_no_change_where_they_have_their_defaults() -> None:
    run = resolved(sets=("model.num_kv_heads=1", "model.dropout=0.2"))
    older = {key: value for key, value in identity(run).items() if not key.startswith("model.rope_")}
    assert find_changes(older, identity(run)), "the test would see nothing"
    assert find_changes(with_added_options(older, run), identity(run)) == ()


def test_a_key_of_the_training_that_a_later_version_added_is_no_change_where_it_has_its_default() -> None:
    run = resolved()
    older = {key: value for key, value in identity(run).items() if key != "train.matmul_precision"}
    assert find_changes(with_added_options(older, run), identity(run)) == ()
    now = resolved(sets=("train.matmul_precision=high",))
    assert [str(each) for each in find_changes(with_added_options(older, now), identity(now))] == [
        "train.matmul_precision=highest, now high"
    ]


def test_an_added_option_with_another_value_is_a_change() -> None:
    run = resolved(sets=("model.attention_window=4",))
    older = {key: value for key, value in identity(run).items() if key != "model.attention_window"}
    assert [str(each) for each in find_changes(with_added_options(older, run), identity(run))] == [
        "model.attention_window=unset, now 4"
    ]


def test_another_models_options_are_left_as_they_were_saved() -> None:
    run = resolved()
    found = with_added_options({"model.use": "other", "model.width": 3}, run)
    assert {key: value for key, value in found.items() if key.startswith("model.")} == {
        "model.use": "other",
        "model.width": 3,
    }


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"extend": True}, "--extend"),
        ({"allow_change": ("train.lr",)}, "--allow-change"),
        ({"allow_plugin_change": ("scaler",)}, "--allow-plugin-change"),
        ({"resume": "3"}, "--resume 3"),
    ],
)
def test_a_word_about_a_run_that_goes_on_needs_that_run(given: dict[str, Any], option: str) -> None:
    run = resolved()
    with pytest.raises(InputError, match=f"^{option} is about a run that goes on, and run.folder names none"):
        check_run_folder(replace(run, request=replace(run.request, **given)))
    for sets in (("run.folder=new",), ("run.branch_from=old@3",)):
        run = resolved(sets=sets)
        check_run_folder(replace(run, request=replace(run.request, **given)))
    for resume in ("auto", "never"):
        run = resolved()
        check_run_folder(replace(run, request=replace(run.request, resume=resume)))
