"""What identifies a run, across versions whose models have more options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_run.config.request import Request
from megatron_run.errors import InputError
from megatron_run.planning import ResolvedRun, load_config, resolve
from megatron_run_engine.run_folder import check_run_folder, open_run_folder
from megatron_run_engine.run_folder.changes import check_names, find_changes, identity, with_added_options
from tests.support.resolving import resolved


def test_options_that_a_later_version_added_are_no_change_where_they_have_their_defaults() -> None:
    run = resolved(sets=("model.num_kv_heads=1", "model.dropout=0.2"))
    older = {key: value for key, value in identity(run).items() if not key.startswith("model.rope.")}
    assert older != identity(run), "the test would see nothing"
    assert find_changes(with_added_options(older, run), run) == ()


def test_a_key_of_the_training_that_a_later_version_added_is_no_change_where_it_has_its_default() -> None:
    run = resolved()
    older = {key: value for key, value in identity(run).items() if key != "train.matmul_precision"}
    assert find_changes(with_added_options(older, run), run) == ()
    now = resolved(sets=("train.matmul_precision=high",))
    assert [str(each) for each in find_changes(with_added_options(older, now), now)] == [
        "train.matmul_precision=highest, now high"
    ]


def test_an_added_option_with_another_value_is_a_change() -> None:
    run = resolved(sets=("model.attention.window=4",))
    older = {key: value for key, value in identity(run).items() if key != "model.attention.window"}
    assert [str(each) for each in find_changes(with_added_options(older, run), run)] == [
        "model.attention.window=unset, now 4"
    ]


def test_another_models_options_are_left_as_they_were_saved() -> None:
    run = resolved()
    found = with_added_options({"model.use": "other", "model.width": 3}, run)
    assert {key: value for key, value in found.items() if key.startswith("model.")} == {
        "model.use": "other",
        "model.width": 3,
    }


@pytest.mark.parametrize("name", ["parallel-layer", "parallel-layer.use", "parallel_layer.use", "train.lr_warmup"])
def test_a_key_may_change_by_each_spelling_that_sets_it(name: str) -> None:
    check_names(replace(resolved().request, allow_change=(name,)), resolved())
    with pytest.raises(InputError, match="there is no such key"):
        check_names(replace(resolved().request, allow_change=(f"{name}s",)), resolved())


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"extend": True}, "--extend"),
        ({"allow_change": ("train.lr",)}, "--allow-change"),
        ({"allow_plugin_change": ("scaler",)}, "--allow-plugin-change"),
        ({"resume": "3"}, "--resume 3"),
    ],
)
def test_a_word_about_a_run_that_goes_on_needs_that_run(given: dict[str, Any], option: str, tmp_path: Path) -> None:
    def asked(*sets: str) -> ResolvedRun:
        run = resolved(sets=sets)
        return replace(run, request=replace(run.request, **given))

    with pytest.raises(InputError, match=f"^{option} is about a run that goes on, and run.folder names none; add"):
        check_run_folder(asked())
    new = tmp_path / "new"
    if option == "--resume 3":
        for look in (check_run_folder, open_run_folder):
            with pytest.raises(InputError, match=f"^{option} is about .*none in {new} .*or leave {option} out"):
                look(asked(f"run.folder={new}"))
        assert not list(tmp_path.iterdir()), "nothing is made for it"
    else:  # a script may begin what it extends later
        check_run_folder(asked(f"run.folder={new}"))
    check_run_folder(asked("run.branch_from=old@3", f"run.folder={new}"))
    for resume in ("auto", "never"):
        run = resolved()
        check_run_folder(replace(run, request=replace(run.request, resume=resume)))


@pytest.mark.parametrize("given", [{"extend": True}, {"allow_change": ("train.lr",)}])
def test_a_run_that_is_begun_where_one_was_to_go_on_is_told(given: dict[str, Any], tmp_path: Path) -> None:
    request = Request(("preset:tiny",), values={"run.folder": str(tmp_path)}, **given)
    told = f"is about a run that goes on, and there is none in {tmp_path} yet: this begins one"
    assert [notice for notice in resolve(request).notices if told in notice]
    (tmp_path / "run.json").touch()
    assert not [notice for notice in resolve(request).notices if told in notice]


def test_weights_of_another_tokenizer_may_be_allowed_where_no_run_goes_on(tmp_path: Path) -> None:
    run = resolved(sets=("run.init_from=old", f"run.folder={tmp_path / 'new'}"))
    check_run_folder(replace(run, request=replace(run.request, allow_change=("data.tokenizer",))))


def test_a_run_that_was_moved_with_its_configuration_is_named(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    open_run_folder(resolved(sets=(f"run.folder={here}",))).lock.release()
    here.rename(there)
    run = load_config(there / "config.yaml")
    (notice,) = run.notices
    assert notice == (
        f"{there / 'config.yaml'} lies in the run folder {there}, and its run.folder is {here}: "
        f"to go on with the run in {there} add --set run.folder={there}"
    )
    with pytest.raises(InputError, match=f"none in {here} .from {there}/config.yaml .*add --set run.folder={there}"):
        check_run_folder(replace(run, request=replace(run.request, extend=True)))
    assert not load_config(there / "config.yaml", sets={"run.folder": there}).notices
    assert not load_config(there / "config.yaml", sets={"run.folder": tmp_path / "new"}).notices, "it is meant so"
    attempt = load_config(there / "logs" / "attempt-001" / "config.yaml")
    assert f"lies in the run folder {there}" in attempt.notices[0]
