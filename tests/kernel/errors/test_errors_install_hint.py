"""How to install what is missing, from a checkout and from an index."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path

import pytest

from megatron_run.errors.install_hint import ENGINE, how_to_add, how_to_install
from tests.support.checkout import MEMBERS, ROOT, Member


def test_a_kernel_of_a_checkout_says_how_to_install_from_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert how_to_install(ENGINE) == "pip install -e ./core/engine"
    assert how_to_install("megatron-run-parallel-layer-tensor") == "pip install -e ./plugins/parallel-layer/tensor"
    monkeypatch.chdir(tmp_path)
    assert how_to_install(ENGINE) == f"pip install -e {ROOT}/core/engine"


def test_an_installed_kernel_says_how_to_install_from_an_index(tmp_path: Path) -> None:
    installed = tmp_path / "lib/python3.12/site-packages/megatron_run/errors/install_hint.py"
    assert how_to_install("megatron-run-observer-tensorboard", installed) == (
        "pip install megatron-run-observer-tensorboard"
    )


def test_a_copy_that_was_installed_from_a_checkout_says_how_to_install_from_there(tmp_path: Path) -> None:
    """No index need have the packages; pip keeps the folder's address."""
    site, tree = tmp_path / "site-packages", tmp_path / "a tree"
    kernel = site / "megatron_run" / "errors" / "install_hint.py"
    for folder in (tree / "core/kernel", tree / "plugins/observer/trace", site / "megatron_run_core-0.1.0.dist-info"):
        folder.mkdir(parents=True)
        (folder / "pyproject.toml").write_text("")
    url = (tree / "core/kernel").as_uri()
    record = site / "megatron_run_core-0.1.0.dist-info" / "direct_url.json"
    record.write_text(json.dumps({"url": url, "dir_info": {}}))
    assert how_to_install("megatron-run-observer-trace", kernel) == f"pip install '{tree}/plugins/observer/trace'"
    by_name = "pip install megatron-run-observer-trace"
    for content in (json.dumps({"url": f"{url}-gone"}), "[]", "{", json.dumps({"url": 3})):
        record.write_text(content)
        assert how_to_install("megatron-run-observer-trace", kernel) == by_name


def test_the_libraries_of_an_extra_are_named_as_the_index_has_them() -> None:
    assert how_to_add("megatron-run-data-indexed", "zst") == "pip install 'zstandard>=0.22'"
    found = how_to_add("megatron-run-parallel-layer-te", "engine", "--no-build-isolation")
    assert found.startswith("pip install --no-build-isolation 'transformer-engine[pytorch]")
    assert how_to_add("megatron-run-nothing", "zst") == "pip install megatron-run-nothing"


@pytest.mark.parametrize("asked", [[], ["click>=8"], ["hub-library>=1; extra == 'hub' and python_version < '3.13'"]])
def test_an_extra_of_which_the_metadata_name_no_library_is_asked_for_itself(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never a bare ``pip install``: as of an older version, or with a condition more."""
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: asked)
    assert how_to_add("a-plugin", "hub", "--no-deps") == "pip install --no-deps 'a-plugin[hub]'"


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
def test_no_message_says_by_hand_how_a_package_of_ours_is_installed(member: Member) -> None:
    """No index need have it: the functions here know what can be typed."""
    for name, file in member.modules.items():
        text = file.read_text(encoding="utf-8")
        assert name.endswith("install_hint") or not re.search(r"pip install[^\n]*megatron-run-", text), file


def test_a_plugin_is_installed_together_with_the_engine_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a checkout pip would look for the engine on an index, which need not have it."""
    for folder, needs in (("core/engine", "megatron-run-core"), ("plugins/scaler/dynamic", ENGINE)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "pyproject.toml").write_text(f'name = "{ENGINE}"\ndependencies = ["{needs}==1"]')
    monkeypatch.setattr("megatron_run.errors.install_hint.find_spec", lambda _: None)
    kernel = tmp_path / "core/kernel/src/megatron_run/errors/install_hint.py"
    asked = how_to_install("megatron-run-scaler-dynamic", kernel)
    assert asked == f"pip install -e {tmp_path}/core/engine -e {tmp_path}/plugins/scaler/dynamic"
    assert how_to_install(ENGINE, kernel) == f"pip install -e {tmp_path}/core/engine", "once, though it is named there"
