from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_run import __version__
from megatron_run.errors import ExitCode, InputError, PluginError
from megatron_run.registry.choose import check_kind, choose
from megatron_run.registry.discover import KERNEL, Catalog, Entry, scan
from tests.support.fake_plugins import FakeSite

ORIGIN = "--plugin schedule=..."
BUILT_IN = Entry("schedule", "sequential", "built_in", KERNEL, "0.1.0")
ACME = Entry("schedule", "zigzag", "acme", "acme-zigzag", "0.3.0", ">=0.1,<0.2")
ZEBRA = Entry("schedule", "zigzag", "zebra", "zebra-schedules", "2.0")
SHADOW = Entry("schedule", "sequential", "shadow", "acme-zigzag", "0.3.0")


def refusal(catalog: Catalog, word: str, kind: str = "schedule") -> str:
    with pytest.raises(PluginError) as caught:
        choose(catalog, kind, word, ORIGIN)
    assert caught.value.exit_code == ExitCode.PLUGIN
    return str(caught.value)


def test_a_name_chooses_its_one_entry() -> None:
    assert choose(Catalog((BUILT_IN, ACME)), "schedule", "zigzag", ORIGIN) is ACME


@pytest.mark.parametrize("distribution", ["acme-zigzag", "Acme_Zigzag"])
def test_a_distribution_before_the_name_settles_an_ambiguity(distribution: str) -> None:
    assert choose(Catalog((ACME, ZEBRA)), "schedule", f"{distribution}:zigzag", ORIGIN) is ACME


def test_two_distributions_with_one_name_are_an_error_that_lists_both() -> None:
    assert refusal(Catalog((ACME, ZEBRA)), "zigzag") == (
        "plugin schedule=zigzag is offered by 2 distributions: acme-zigzag 0.3.0, zebra-schedules 2.0 "
        f"(from {ORIGIN}); choose --plugin schedule=acme-zigzag:zigzag or --plugin schedule=zebra-schedules:zigzag"
    )


def test_shadowing_a_built_in_is_an_error_that_lists_both() -> None:
    assert refusal(Catalog((SHADOW, BUILT_IN)), "sequential") == (
        "plugin schedule=sequential is offered by 2 distributions: megatron-run-core 0.1.0 (built in), "
        f"acme-zigzag 0.3.0 (from {ORIGIN}); choose --plugin schedule=megatron-run-core:sequential or "
        "--plugin schedule=acme-zigzag:sequential"
    )


def test_a_distribution_that_does_not_offer_the_name_is_an_error_with_those_that_do() -> None:
    assert refusal(Catalog((ACME,)), "acme:zigzag") == (
        f"acme offers no schedule=zigzag (from {ORIGIN}); choose --plugin schedule=acme-zigzag:zigzag"
    )


def test_an_unknown_name_is_answered_with_the_nearest_and_the_installed() -> None:
    assert refusal(Catalog((BUILT_IN, ACME)), "zigzga") == (
        f"no installed plugin is schedule=zigzga (from {ORIGIN}); did you mean 'zigzag'? installed: sequential, zigzag"
    )


def test_a_known_package_is_answered_with_its_install_line() -> None:
    assert refusal(Catalog((BUILT_IN,)), "interleaved") == (
        f"no installed plugin is schedule=interleaved (from {ORIGIN}); "
        "pip install -e ./plugins/schedule/interleaved; installed: sequential"
    )


def test_an_unknown_kind_is_answered_with_the_nearest_and_all() -> None:
    with pytest.raises(InputError) as caught:
        choose(Catalog(()), "scheduler", "1f1b", ORIGIN)
    assert caught.value.exit_code == ExitCode.INPUT
    assert str(caught.value) == (
        f"unknown kind 'scheduler' (from {ORIGIN}); did you mean 'schedule'? the kinds are scaler, optimizer, "
        "schedule, parallel-layer, graph-capture, model, data, observer, format"
    )


def test_a_kind_may_be_spelt_with_an_underscore() -> None:
    assert check_kind("parallel_layer", ORIGIN) == "parallel-layer"


@pytest.mark.parametrize("requires", [">=7", "<0.1", ">=0.2", "~=1.0"])
def test_a_plugin_for_another_kernel_is_refused_from_its_metadata(site: FakeSite, requires: str) -> None:
    site.module("acme_zigzag", "raise SystemExit('imported')")
    site.distribution("acme-zigzag", {"schedule": {"zigzag": "acme_zigzag"}}, requires=[f"megatron-run-core{requires}"])
    assert refusal(scan(site.path), "zigzag") == (
        "plugin schedule=zigzag of acme-zigzag 1.0 does not fit this kernel: "
        f"it needs megatron-run-core{requires}, and {__version__} is installed (from {ORIGIN}); "
        f"install a version of acme-zigzag made for megatron-run-core {__version__}"
    )
    assert "acme_zigzag" not in sys.modules


def test_a_file_is_named_after_its_stem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    path = tmp_path.resolve() / "mine.py"
    for word in ("mine.py", "./mine.py", str(path)):
        entry = choose(Catalog(()), "schedule", word, ORIGIN)
        assert (entry.kind, entry.name, entry.file) == ("schedule", "mine", path)
        assert entry.source == str(path)


def test_a_missing_file_and_a_folder_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = tmp_path.resolve()
    fix = "write schedule=NAME, or the path of a Python file"
    assert refusal(Catalog(()), "./mine.py") == (
        f"the plugin file ./mine.py cannot be read: there is no {here}/mine.py (from {ORIGIN}); {fix}"
    )
    (tmp_path / "folder").mkdir()
    assert refusal(Catalog(()), "./folder") == (
        f"the plugin file ./folder cannot be read: it is a folder (from {ORIGIN}); {fix}"
    )


def test_a_plugin_in_a_misspelt_group_is_found_out_where_it_is_chosen(site: FakeSite) -> None:
    site.distribution("acme-count", {"megatron_run.parallel-layer": {"counting": "acme_count"}}, version="0.3.0")
    line = refusal(scan(site.path), "counting", "parallel-layer")
    assert "acme-count 0.3.0 offers 'counting' in the unknown group 'megatron_run.parallel-layer'" in line
    assert "did you mean 'megatron_run.parallel_layer'?" in line
