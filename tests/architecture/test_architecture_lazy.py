"""Importing the package, planning and listing plugins are instant: the heavy libraries stay out."""

from __future__ import annotations

import py_compile
import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from megatron_run.contracts import KINDS, entry_point_group
from megatron_run.contracts.plugin import COMMAND
from megatron_run.errors.install_hint import ENGINE_MODULES
from tests.support.checkout import COMMAND_LINE, ENGINE, INFERENCE, KERNEL, PLUGINS

#: Light code may not even need these.
HEAVY = {"torch", "numpy", "pydantic", "rich", "ruamel.yaml", "tensorboard"}
REPORT = "\nimport sys; print('|'.join(sys.modules))"
#: A report on what the engine wrote; its command imports it late.
OF_THE_ENGINE = "megatron_run_cli.reports.saved_steps"
#: Every other module of the kernel and of the command imports without the engine, whatever else it needs.
WITHOUT_ENGINE = sorted(
    name
    for name in (*KERNEL.modules, *COMMAND_LINE.modules)
    if not name.endswith(".__main__") and name != OF_THE_ENGINE
)
#: Packages that load their public names when these are first used.
LAZY = {
    name: file
    for member in (KERNEL, ENGINE, INFERENCE)
    for name, file in member.modules.items()
    if file.name == "__init__.py" and "_names(__name__" in file.read_text(encoding="utf-8")
}
PLUGINS_LIST = """
import sys
from megatron_run_cli.main import main
sys.argv = ["megatron-run", "plugins", "list"]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""
COMMANDS_LOADED = """
from megatron_run.registry.discover import scan
from megatron_run.registry.loaded_command import load_command
for entry in scan(kind="command").commands:
    load_command(entry)
"""


def loaded_by(code: str) -> set[str]:
    """The modules that are loaded after ``code`` ran in a fresh interpreter."""
    command = [sys.executable, "-c", code + REPORT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split("|"))


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert not loaded_by("import megatron_run") & HEAVY


def test_import_time_report_names_no_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-c", "import megatron_run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    report = done.stderr
    assert "megatron_run" in report
    assert "torch" not in report


def test_importing_the_launcher_loads_nothing_of_torch() -> None:
    """Ranks and their server first set what torch and the libraries below it read from the environment."""
    program = "megatron_run_engine.launch.fork_server, megatron_run_engine.launch.rank"
    assert not loaded_by(f"import megatron_run_engine.launch, {program}") & {"torch", "numpy"}


def test_what_watches_beside_each_rank_loads_nothing_heavy() -> None:
    assert not loaded_by("import megatron_run_engine.launch.watchdog.sidecar") & HEAVY


def test_reading_planning_and_explaining_load_nothing_of_the_engine() -> None:
    """With the modules of every command: what needs the engine is imported where it is used."""
    loaded = loaded_by("\n".join(f"import {name}" for name in WITHOUT_ENGINE))
    assert not loaded & ENGINE_MODULES


def test_planning_a_built_in_model_loads_its_options_alone() -> None:
    plan = PLUGINS_LIST.replace('"plugins", "list"', '"plan", "preset:mixture", "--gpus", "8"')
    loaded = loaded_by(plan)
    assert "megatron_run_engine.builtin.model.gpt_options" in loaded
    assert not loaded & {"torch", "numpy", "tokenizers"}


def test_listing_plugins_loads_nothing_heavy_and_no_plugin() -> None:
    values = {point.value for kind in KINDS for point in entry_points(group=entry_point_group(kind))}
    loaded = loaded_by(PLUGINS_LIST)
    assert not loaded & HEAVY
    assert not loaded & values
    assert not loaded & {plugin.package for plugin in PLUGINS}


def test_help_loads_nothing_heavy_and_no_command_of_our_own_packages() -> None:
    loaded = loaded_by(PLUGINS_LIST.replace('"plugins", "list"', '"--help"'))
    assert not loaded & HEAVY
    assert not loaded & {point.value for point in entry_points(group=entry_point_group(COMMAND))}


def test_commands_of_packages_load_nothing_heavy_before_they_run() -> None:
    loaded = loaded_by(COMMANDS_LOADED)
    assert not loaded & HEAVY
    values = {point.value for point in entry_points(group=entry_point_group(COMMAND))}
    assert values
    assert values <= loaded


@pytest.mark.parametrize("library", sorted(HEAVY - {"tensorboard", "torch"}))  # these two take seconds
def test_a_heavy_import_would_be_seen(library: str) -> None:
    assert library in loaded_by(f"import {library}")


@pytest.mark.parametrize(("package", "file"), LAZY.items(), ids=LAZY)
def test_a_lazy_package_offers_and_shows_its_names(package: str, file: Path) -> None:
    module = import_module(package)
    offered: dict[str, object] = {}
    exec(f"from {package} import *", offered)
    assert offered.keys() - {"__builtins__"} == set(module.__all__)
    assert not offered.keys() & {"TYPE_CHECKING", "annotations", "lazy_names", "typed_names"}
    assert {*module.__all__, *vars(module), "__name__", "__doc__"} <= {*dir(module)}
    assert vars(module).items() >= {(name, offered[name]) for name in module.__all__}, "each is looked up once"
    assert not {
        name for name in module.__all__ if (file.parent / name).is_dir() or (file.parent / f"{name}.py").exists()
    }


def test_a_lazy_package_without_its_source_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``python -m compileall -b`` and then no source leaves a package."""
    source = tmp_path / "only_bytes.py"
    source.write_text("from megatron_run.lazy import typed_names\n__all__ = typed_names(__name__)[2]\n")
    py_compile.compile(str(source), str(source.with_suffix(".pyc")))
    source.unlink()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="only_bytes is installed without its source") as caught:
        import_module("only_bytes")
    assert caught.value.name == "only_bytes"
    assert "\n" not in str(caught.value)


def test_the_package_of_indexed_data_offers_its_options_and_loads_them_late() -> None:
    package = "megatron_run_data_indexed"
    assert f"{package}.options" not in loaded_by(f"import {package}")
    assert f"{package}.options" in loaded_by(f"from {package} import IndexedOptions")
