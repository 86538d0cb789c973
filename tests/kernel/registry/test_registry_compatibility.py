from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pluggy
import pytest

from megatron_run import hookspecs
from megatron_run.contracts import PluginInfo
from megatron_run.errors import ExitCode, PluginError
from megatron_run.hookspecs import hookimpl
from megatron_run.registry.compatibility import mismatches, misstacked, unserved
from megatron_run.registry.discover import KERNEL, Catalog, Entry
from megatron_run.registry.loaded_plugin import Plugin, unloaded

NOTHING = Catalog(())
INSTALLED = Catalog(
    tuple(
        Entry("schedule", name, f"package_{name}", f"megatron-run-schedule-{name}", "0.1.0")
        for name in ("1f1b", "interleaved")
    )
)


NONE: frozenset[str] = frozenset()


def plugin(
    kind: str,
    name: str,
    *,
    provides: Iterable[str] = NONE,
    requires: Iterable[str] = NONE,
    conflicts: Iterable[str] = NONE,
) -> Plugin:
    info = PluginInfo(
        kind, name, provides=frozenset(provides), requires=frozenset(requires), conflicts=frozenset(conflicts)
    )
    return Plugin(kind, name, KERNEL, "0.1.0", f"--plugin {kind}={name}", info, "", "", factory=lambda **_: None)


SEQUENTIAL = plugin("schedule", "sequential")
PIPELINED = plugin("schedule", "1f1b", provides={"parallel.pipeline"})


def test_plugins_that_ask_for_nothing_fit() -> None:
    assert mismatches([SEQUENTIAL, plugin("model", "gpt")], NOTHING) == []


def test_a_requirement_is_met_by_an_ability_or_by_a_plugins_name() -> None:
    picky = plugin("optimizer", "picky", requires={"parallel.pipeline", "schedule=1f1b"})
    assert mismatches([picky, PIPELINED], NOTHING) == []


def test_an_unmet_requirement_says_what_to_add() -> None:
    picky = plugin("optimizer", "picky", requires={"parallel.pipeline", "schedule=1f1b", "magic"})
    problems = mismatches([picky, SEQUENTIAL], INSTALLED)
    assert "\n".join(map(str, problems)) == (
        "optimizer=picky requires magic, which no chosen plugin provides (from --plugin optimizer=picky); "
        "choose another optimizer\n"
        "optimizer=picky requires parallel.pipeline, which no chosen plugin provides (from --plugin optimizer=picky); "
        "choose --plugin schedule=1f1b or --plugin schedule=interleaved\n"
        "optimizer=picky requires schedule=1f1b, which no chosen plugin provides (from --plugin optimizer=picky); "
        "add --plugin schedule=1f1b"
    )
    assert {problem.exit_code for problem in problems} == {ExitCode.PLUGIN}


def test_a_conflict_names_both_plugins() -> None:
    jealous = plugin("graph-capture", "jealous", conflicts={"parallel.pipeline", "graph-capture=jealous"})
    (problem,) = mismatches([PIPELINED, jealous], NOTHING)
    assert str(problem) == (
        "graph-capture=jealous does not work together with schedule=1f1b: graph-capture=jealous conflicts with "
        "parallel.pipeline (from --plugin graph-capture=jealous); choose another graph-capture or another schedule"
    )
    assert problem.exit_code == ExitCode.PLUGIN


def test_a_size_of_one_needs_nobody() -> None:
    assert unserved({"parallel.tensor": 1, "parallel.sequence": False}, [SEQUENTIAL], NOTHING) == []


def test_a_size_that_is_served_is_no_problem() -> None:
    assert unserved({"parallel.pipeline": 4}, [PIPELINED], NOTHING) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_word_that_needs_no_service_needs_nobody(precision: str) -> None:
    assert unserved({"train.precision": precision}, [SEQUENTIAL], NOTHING) == []


def test_a_word_is_served_by_the_ability_of_key_and_word() -> None:
    scaling = plugin("scaler", "mine", provides={"train.precision=fp16"})
    assert unserved({"train.precision": "fp16"}, [scaling], NOTHING) == []
    (problem,) = unserved({"train.precision": "fp16"}, [plugin("scaler", "none")], NOTHING)
    assert str(problem) == (
        "train.precision=fp16 needs a plugin that serves it: scaler=none does not; "
        "pip install -e ./plugins/scaler/constant and choose --plugin scaler=constant "
        "or pip install -e ./plugins/scaler/dynamic and choose --plugin scaler=dynamic; "
        "or set train.precision=bf16"
    )


def test_an_unserved_size_names_the_installed_plugin_to_choose() -> None:
    (problem,) = unserved({"parallel.pipeline": 2}, [SEQUENTIAL], INSTALLED)
    assert str(problem) == (
        "parallel.pipeline=2 needs a plugin that serves it: schedule=sequential does not; "
        "choose --plugin schedule=1f1b or --plugin schedule=interleaved; or set parallel.pipeline=1"
    )
    assert problem.exit_code == ExitCode.INPUT


def test_an_unserved_size_names_the_package_to_install() -> None:
    (problem,) = unserved({"parallel.chunks": 2}, [SEQUENTIAL], NOTHING)
    assert problem.fix == (
        "pip install -e ./plugins/schedule/gpipe and choose --plugin schedule=gpipe "
        "or pip install -e ./plugins/schedule/interleaved and choose --plugin schedule=interleaved "
        "or pip install -e ./plugins/schedule/zero-bubble and choose --plugin schedule=zero-bubble; "
        "or set parallel.chunks=1"
    )


def test_a_switch_is_served_or_set_back_like_a_size() -> None:
    problems = unserved({"parallel.tensor": 2, "parallel.sequence": True}, [plugin("parallel-layer", "dense")], NOTHING)
    install = (
        "pip install -e ./plugins/parallel-layer/te and choose --plugin parallel-layer=te "
        "or pip install -e ./plugins/parallel-layer/tensor and choose --plugin parallel-layer=tensor"
    )
    assert "\n".join(map(str, problems)) == (
        f"parallel.tensor=2 needs a plugin that serves it: parallel-layer=dense does not; {install}; "
        "or set parallel.tensor=1\n"
        f"parallel.sequence=true needs a plugin that serves it: parallel-layer=dense does not; {install}; "
        "or set parallel.sequence=false"
    )


def test_a_size_that_nobody_knows_how_to_serve_is_set_back() -> None:
    (problem,) = unserved({"parallel.shelves": 2}, [SEQUENTIAL], INSTALLED)
    assert (
        str(problem)
        == "parallel.shelves=2 needs a plugin that serves it: no chosen plugin does; set parallel.shelves=1"
    )


class Whole:
    """Makes every layer."""

    @hookimpl
    def megatron_run_create_parallel_layer(self, context: object) -> None:
        """Nothing is made here."""


class Changing:
    """Changes layers of the factory below."""

    @hookimpl
    def megatron_run_create_parallel_layer(self, context: object, base: object) -> None:
        """Nothing is made here."""


def factory(name: str, hooks: object) -> Plugin:
    """An installed and loaded factory of layers."""
    manager = pluggy.PluginManager("megatron_run")
    manager.add_hookspecs(hookspecs)
    manager.register(hooks)
    entry = Entry("parallel-layer", name, f"package_{name}", "acme", "1.0")
    create = manager.hook.megatron_run_create_parallel_layer
    return replace(plugin("parallel-layer", name), factory=create, entry=entry)


def stand_in(name: str) -> Plugin:
    """One that is installed and was not loaded, as by ``config show``, which runs no file."""
    loaded = factory(name, Whole())
    return unloaded("parallel-layer", name, loaded.origin, loaded.entry, PluginError(f"{name} was not loaded"))


def test_one_factory_makes_every_layer_and_others_above_it_change_some() -> None:
    dense, split = (factory(name, Whole()) for name in ("dense", "split"))
    norms, seen = (factory(name, Changing()) for name in ("norms", "seen"))
    assert misstacked([dense, norms, seen]) == []
    (hidden,) = misstacked([split, dense, norms])
    assert str(hidden) == (
        "parallel-layer=split and parallel-layer=dense each make every layer: the upper would hide the lower (from "
        "--plugin parallel-layer=split); write --plugin parallel-layer=split+norms or --plugin "
        "parallel-layer=dense+norms"
    )
    for stack in ([norms], [norms, dense]):
        (groundless,) = misstacked(stack)
        assert str(groundless).startswith("parallel-layer=norms changes layers of the factory below it: there is none")
        assert groundless.fix == "write --plugin parallel-layer=dense+norms"


def test_a_factory_that_was_not_loaded_or_is_an_object_fits_any_stack() -> None:
    dense, norms = factory("dense", Whole()), factory("norms", Changing())
    for unknown in (stand_in("mine"), replace(dense, entry=None)):
        assert misstacked([dense, unknown]) == []
        assert misstacked([dense, norms, unknown]) == []
        assert misstacked([unknown, norms]) == []
