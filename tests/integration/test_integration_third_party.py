"""A plugin of someone else: packaged, installed, found, chosen, run and uninstalled; and one in a single file."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from megatron_run.errors import ExitCode
from megatron_run.registry.discover import Catalog
from megatron_run_cli.commands.new_package import write_package
from tests.support.fake_plugins import FakeSite, schedule_source
from tests.support.forked import forked_command
from tests.support.scratch import Scratch

COMMAND = ("-m", "megatron_run_cli")
QUICK = ("preset:tiny", "--set", "train.steps=3", "--set", "eval.batches=1")


def listed(scratch: Scratch) -> dict[str, str]:
    """The schedules that the environment sees: name -> distribution and version."""
    done = scratch.run(*COMMAND, "plugins", "list", "--json")
    assert done.returncode == 0, done.stderr
    plugins = json.loads(done.stdout)["plugins"]
    return {each["name"]: f"{each['distribution']} {each['version']}" for each in plugins if each["kind"] == "schedule"}


@pytest.mark.nightly
@pytest.mark.multiproc
def test_a_package_is_installed_found_chosen_run_and_uninstalled(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path / "env")
    package = write_package("schedule", "zigzag", tmp_path / "zigzag", Catalog(()))
    assert "zigzag" not in listed(scratch)

    done = scratch.pip("install", "--no-index", "--no-build-isolation", package.folder)
    assert done.returncode == 0, done.stderr
    assert listed(scratch)["zigzag"] == f"{package.distribution} 0.1.0"

    folder = tmp_path / "run"
    choice = ("--plugin", "schedule=zigzag", "--set", "parallel.pipeline=2", "--set", f"run.folder={folder}")
    done = scratch.run(*COMMAND, *QUICK, *choice)
    assert done.returncode == ExitCode.DONE, done.stderr
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert package.distribution in (folder / "plan.json").read_text()

    assert scratch.pip("uninstall", "-y", package.distribution).returncode == 0
    assert "zigzag" not in listed(scratch)
    done = scratch.run(*COMMAND, *QUICK, "--plugin", "schedule=zigzag")
    assert done.returncode == ExitCode.PLUGIN
    assert "no installed plugin is schedule=zigzag" in done.stderr


@pytest.mark.nightly
def test_pip_refuses_a_package_made_for_another_kernel(tmp_path: Path) -> None:
    package = write_package("schedule", "zigzag", tmp_path / "zigzag", Catalog(()))
    project = package.folder / "pyproject.toml"
    project.write_text(project.read_text().replace("megatron-run-core>=0.1,<0.2", "megatron-run-core>=7"))
    done = Scratch(tmp_path / "env").pip("install", "--no-index", "--no-build-isolation", package.folder)
    assert done.returncode == 1
    assert "megatron-run-core>=7" in done.stderr


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in ``folder``, with its ``site`` on the path as if it were installed."""
    return forked_command(arguments, folder, variables={"PYTHONPATH": str(folder / "site")})


@pytest.mark.nightly  # test_docs_readme trains with one
@pytest.mark.multiproc
def test_a_single_file_runs_without_packaging(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(schedule_source())
    done = run(tmp_path, *QUICK, "--plugin", "schedule=./mine.py", "--set", "run.folder=run")
    assert done.returncode == ExitCode.DONE, done.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.nightly  # every plugin is imported in a process of its own, as in test_cli_commands
def test_a_broken_plugin_hurts_only_those_who_choose_it(tmp_path: Path) -> None:
    FakeSite(tmp_path / "site").schedule("broken", "raise SystemExit(3)", distribution="acme-broken")

    unharmed = run(tmp_path, *QUICK, "--dry-run")
    assert unharmed.returncode == ExitCode.DONE, unharmed.stderr

    checked = run(tmp_path, "plugins", "list", "--check", "--json")
    assert checked.returncode == ExitCode.DONE, checked.stderr
    states = {each["name"]: (each["state"], each["problem"]) for each in json.loads(checked.stdout)["plugins"]}
    assert states.pop("broken") == ("BROKEN", "SystemExit: 3")
    without_library = {states.pop(name) for name in ("te",) if states[name][0] == "cannot run"}
    assert without_library <= {("cannot run", "")}
    assert set(states.values()) == {("ok", "")}

    chosen = run(tmp_path, *QUICK, "--plugin", "schedule=broken")
    assert chosen.returncode == ExitCode.PLUGIN
    assert "plugin schedule=broken of acme-broken 1.0 cannot be imported: SystemExit: 3" in chosen.stderr
    assert "Traceback" not in chosen.stderr
    assert "Traceback" in run(tmp_path, *QUICK, "--plugin", "schedule=broken", "--debug").stderr
