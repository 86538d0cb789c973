"""How to install what is missing, from a checkout and from an index."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_run.errors.install_hint import ENGINE, how_to_install
from tests.support.checkout import ROOT


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


def test_a_plugin_is_installed_together_with_the_engine_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a checkout pip would look for the engine on an index, which need not have it."""
    for folder, needs in (("core/engine", "megatron-run-core"), ("plugins/scaler/dynamic", ENGINE)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "pyproject.toml").write_text(f'dependencies = ["{needs}==1"]')
    monkeypatch.setattr("megatron_run.errors.install_hint.find_spec", lambda _: None)
    kernel = tmp_path / "core/kernel/src/megatron_run/errors/install_hint.py"
    asked = how_to_install("megatron-run-scaler-dynamic", kernel)
    assert asked == f"pip install -e {tmp_path}/core/engine -e {tmp_path}/plugins/scaler/dynamic"
