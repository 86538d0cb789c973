"""Commands of packages: found by metadata, imported when asked for, named where two have one, and missed by name."""

from __future__ import annotations

import json
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import Any

import click
import pytest

from megatron_run.errors import ExitCode
from megatron_run.registry import discover, loaded_command
from megatron_run.registry.discover import Catalog, Entry
from megatron_run.registry.known import KNOWN_COMMANDS
from megatron_run_cli import command_groups
from megatron_run_cli.completion.shells import VARIABLE, Bash
from megatron_run_cli.main import main, program
from megatron_run_testing.conformance import check
from tests.support.checkout import ROOT
from tests.support.fake_plugins import FakeSite

Output = pytest.CaptureFixture[str]
EXAMPLE = ROOT / "tests" / "examples" / "command" / "losses.py"
SOURCE = """
import click
from megatron_run.hookspecs import hookimpl

@click.command()
def mine():
    "Say who brings it."
    click.echo(__name__)

@hookimpl
def megatron_run_commands():
    return {NAMES}
"""


def offer(site: FakeSite, distribution: str, *names: str, source: str = SOURCE) -> None:
    """Install a package that offers the same command under each of ``names``."""
    package = distribution.replace("-", "_")
    site.module(package, source.replace("{NAMES}", "{" + ", ".join(f"{name!r}: mine" for name in names) + "}"))
    site.distribution(distribution, {"command": dict.fromkeys(names, package)})


def refused(capsys: Output, *words: str) -> str:
    """The one line with which a command ends for want of a package, or for a broken one."""
    assert main(words) == ExitCode.PLUGIN
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("megatron-run: ").rstrip()


@pytest.fixture
def losses(site: FakeSite) -> None:
    (site.folder / "losses.py").write_text(EXAMPLE.read_text(encoding="utf-8"), encoding="utf-8")
    site.distribution("acme-losses", {"command": {"losses": "losses"}})


@pytest.mark.usefixtures("losses")
def test_the_example_of_the_page_runs_and_is_listed_and_completed(tmp_path: Path, capsys: Output) -> None:
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    (run / "eval.jsonl").write_text('{"loss": 2.5}\n{"loss": 1.25}\n')
    assert main(["losses", str(tmp_path / "runs")]) == 0
    assert capsys.readouterr().out.splitlines() == ["run    loss", "first  1.2500"]
    assert main(["losses", str(tmp_path / "runs"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"run": "first", "loss": 1.25}]
    assert main(["losses", str(tmp_path)]) == ExitCode.INPUT
    assert capsys.readouterr().err.startswith(f"megatron-run: no run in {tmp_path} was evaluated; ")
    assert main(["losses"]) == ExitCode.INPUT
    assert capsys.readouterr().err.endswith(" Type, as an example: megatron-run losses runs\n")
    assert main(["--help"]) == 0
    assert "  losses      List the last losses of each run in FOLDER.\n" in capsys.readouterr().out
    completed = Bash(program, {}, "megatron-run", VARIABLE).get_completions([], "los")
    assert [item.value for item in completed] == ["losses"]


def test_the_example_is_what_a_new_package_has() -> None:
    template = (ROOT / "cli/src/megatron_run_cli/templates/command.py.in").read_text(encoding="utf-8")
    assert EXAMPLE.read_text(encoding="utf-8") == Template(template).substitute(name="losses", typed="losses")


@pytest.mark.parametrize("words", ["data mine", "plugins mine", "plan mine", "mine", "of acme mine"])
def test_a_command_goes_into_a_group_of_the_command_line_of_a_package_or_of_none(
    words: str, site: FakeSite, capsys: Output
) -> None:
    offer(site, "acme-mine", words.replace(" ", "."))
    assert main(words.split()) == 0
    assert capsys.readouterr().out == "acme_mine\n"
    assert main([*words.split()[:-1], "--help"]) == 0
    assert "  mine " in capsys.readouterr().out


def test_one_module_offers_several_commands(site: FakeSite, capsys: Output) -> None:
    offer(site, "acme-mine", "mine", "data.mine")
    assert main(["mine"]) == 0
    assert main(["data", "mine"]) == 0
    assert capsys.readouterr().out == "acme_mine\n" * 2


def test_a_command_that_two_packages_offer_names_both_and_hurts_no_other(site: FakeSite, capsys: Output) -> None:
    offer(site, "acme-mine", "mine")
    offer(site, "other-mine", "mine", "theirs")
    what = "the command 'mine' is offered by 2 distributions: acme-mine 1.0, other-mine 1.0"
    assert refused(capsys, "mine") == f"{what}; uninstall all but one of them"
    assert main(["theirs"]) == 0
    assert capsys.readouterr().out == "other_mine\n"
    assert main(["--help"]) == 0
    captured = capsys.readouterr()
    assert "  theirs " in captured.out
    assert "  mine " not in captured.out
    assert captured.err == f"megatron-run: {what}; uninstall all but one of them\n"
    states = listed(capsys)
    assert states["mine"]["state"] == "AMBIGUOUS"
    assert "offers command=mine too: uninstall one" in states["mine"]["problem"]


def test_a_command_that_a_groups_package_has_already_names_both(site: FakeSite, capsys: Output) -> None:
    offer(site, "acme-mine", "data.prepare")
    said = refused(capsys, "data", "prepare")
    assert said.startswith("the command 'data prepare' is offered by 2 distributions: megatron-run-data-indexed ")
    assert "acme-mine 1.0" in said
    assert main(["data", "inspect", "--help"]) == 0


@pytest.mark.parametrize("name", ["train", "plugins.list"])
def test_the_command_lines_own_come_first(name: str, site: FakeSite, capsys: Output) -> None:
    offer(site, "acme-mine", name)
    assert main([*name.split("."), "--help"]) == 0
    assert "who brings it" not in capsys.readouterr().out
    assert listed(capsys)[name]["problem"] == "megatron-run has this command itself"
    assert main(["plugins", "why", "command"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "acme-mine" in line)
    assert not line.startswith("chosen")


GROUPS = SOURCE.replace(
    "@hookimpl",
    """
@click.group()
def plain():
    "Of no cls."

@click.group(cls=Commands)
def open_to_all():
    "Of the right cls."

open_to_all.add_command(mine, "taken")

@hookimpl""",
).replace("import click", "import click\nfrom megatron_run_cli.command_groups import Commands")
#: Names of commands, and why nobody can type them; acme-groups has commands ``mine``, ``plain`` and ``open``.
UNREACHABLE = {
    "doctor.x": "packages add no commands to 'megatron-run doctor', which is no group",
    "train.x": "packages add no commands to 'megatron-run train', which is no group",
    "completion.bash.x": "packages add no commands to 'megatron-run completion', which is ",
    "data.cache.x": "packages add no commands to 'megatron-run data cache', which is ",
    "mine.x": "packages add no commands to 'megatron-run mine', which is no group",
    "plain.x.y": "packages add no commands to 'megatron-run plain', which is a group without cls=Commands",
    "open.taken": "acme-groups 1.0 has this command in its group 'open': uninstall one",
    "data.prepare": "has this command in its group 'data': uninstall one",
}


@pytest.mark.parametrize("name", UNREACHABLE)
def test_a_command_that_nobody_can_type_is_told_by_the_list_and_its_check(
    name: str, site: FakeSite, capsys: Output
) -> None:
    offer(site, "acme-mine", name, "open.other", "new.one.two")
    groups = GROUPS.replace("{NAMES}", "{'mine': mine, 'plain': plain, 'open': open_to_all}")
    site.module("acme_groups", groups)
    site.distribution("acme-groups", {"command": dict.fromkeys(("mine", "plain", "open"), "acme_groups")})
    found = listed(capsys)
    assert UNREACHABLE[name] in found[name]["problem"]
    assert found[name]["state"] == "BROKEN"
    assert {each for each in found if found[each]["problem"]} == {name}
    assert main(["plugins", "check", f"command={name}"]) == ExitCode.PLUGIN
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "FAILED" in line)
    assert UNREACHABLE[name] in line
    assert main(["plugins", "check", "command=open.other"]) == 0
    assert main(["open", "other"]) == main(["new", "one", "two"]) == 0
    assert capsys.readouterr().out.count("acme_mine\n") == 2
    assert main(name.split(".")) or "acme_mine" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["train", "plan"])
def test_a_new_package_takes_no_name_that_is_taken(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plugins", "new", "command", name]) == ExitCode.INPUT
    assert f"command={name} is taken by megatron-run" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("written", ["data.losses", "data losses", "acme.losses"])
def test_a_new_command_may_be_in_a_group(
    written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: FakeSite, capsys: Output
) -> None:
    """The package that is written, installed: what is said to type works, arguments too, and its own test passes."""
    monkeypatch.chdir(tmp_path)
    name, typed = ".".join(written.split()), written.replace(".", " ")
    assert main(["plugins", "new", "command", written]) == 0
    _, _, said = capsys.readouterr().out.partition("type it:     megatron-run ")
    folder = tmp_path / f"megatron-run-command-{name.replace('.', '-')}"
    (reported,) = check(str(folder))
    assert (reported.plugin, reported.passed) == (f"command={name}", True)
    points = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["entry-points"]["megatron_run.command"]
    ((point, package),) = points.items()
    assert point == name
    site.module(package, (folder / "src" / package / "__init__.py").read_text())
    site.distribution("acme-mine", {"command": {point: package}})
    assert main(typed.split()) == ExitCode.INPUT
    assert capsys.readouterr().err.endswith(f" Type, as an example: megatron-run {said}")
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "eval.jsonl").write_text('{"loss": 2.5}\n')
    assert main(said.split()) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "first  2.5000"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("train.mine", "packages add no commands to 'megatron-run train', which is no group"),
        ("data.prepare", "has this command in its group 'data'"),
        ("acme", "it is a group, with mine"),
        ("data.", "'data.' cannot name a command: "),
    ],
)
def test_a_new_command_that_nobody_could_type_is_refused(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: FakeSite, capsys: Output
) -> None:
    monkeypatch.chdir(tmp_path)
    offer(site, "acme-mine", "acme.mine")
    assert main(["plugins", "new", "command", name]) == ExitCode.INPUT
    assert why in capsys.readouterr().err
    assert not (tmp_path / f"megatron-run-command-{name.replace('.', '-')}").exists()


def listed(capsys: Output) -> dict[str, dict[str, Any]]:
    assert main(["plugins", "list", "command", "--json"]) == 0
    return {each["name"]: each for each in json.loads(capsys.readouterr().out)["plugins"]}


BROKEN = {
    "raise ValueError('no')": "cannot be imported: ValueError: no; correct line 1 of ",
    "raise SystemExit(3)": "cannot be imported: SystemExit: 3; ",
    "x = 1": "breaks its contract: it has no megatron_run_commands; ",
    SOURCE.replace("@hookimpl", ""): "breaks its contract: megatron_run_commands is not marked @hookimpl; ",
    SOURCE.replace("{NAMES}", "{'other': mine}"): (
        "breaks its contract: megatron_run_commands returned no 'mine', which its entry point names; it has 'other'; "
    ),
    SOURCE.replace("{NAMES}", "{'mine': 3}"): (
        "megatron_run_commands returned an object of type int as 'mine', which is no click.Command; "
    ),
    SOURCE.replace("{NAMES}", "[mine]"): "returned an object of type list, and must return commands by name; ",
    SOURCE.replace("{NAMES}", "1 / 0"): "megatron_run_commands failed: ZeroDivisionError: division by zero; ",
}


@pytest.mark.parametrize("source", BROKEN, ids=BROKEN.values())
def test_a_broken_module_costs_its_command_and_one_line(source: str, site: FakeSite, capsys: Output) -> None:
    offer(site, "acme-mine", "mine", source=source)
    said = refused(capsys, "mine")
    assert said.startswith("the command 'mine' of acme-mine 1.0 ")
    assert BROKEN[source] in said
    assert main(["--help"]) == 0
    captured = capsys.readouterr()
    assert captured.err == f"megatron-run: {said}\n"
    assert "  doctor " in captured.out
    completed = Bash(program, {}, "megatron-run", VARIABLE).get_completions([], "d")
    assert {"data", "doctor"} <= {item.value for item in completed}
    assert capsys.readouterr().err == ""
    assert main(["plugins", "info", "command=mine"]) == ExitCode.PLUGIN


def test_a_command_for_another_kernel_is_refused(site: FakeSite, capsys: Output) -> None:
    site.module("acme_mine", SOURCE)
    site.distribution("acme-mine", {"command": {"mine": "acme_mine"}}, requires=["megatron-run-core>=7"])
    said = refused(capsys, "mine")
    assert "does not fit this kernel: it needs megatron-run-core>=7" in said


def test_a_name_that_nobody_can_type_is_told_and_ignored(site: FakeSite, capsys: Output) -> None:
    offer(site, "acme-mine", "Data.mine")
    assert "Data.mine" not in listed(capsys)
    assert main(["plugins", "list", "schedule"]) == 0
    assert "acme-mine 1.0 offers 'Data.mine', which can be no command" in capsys.readouterr().err


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package with commands is installed."""
    monkeypatch.setattr(command_groups, "scan", lambda kind: Catalog(()))


@pytest.mark.usefixtures("nothing")
@pytest.mark.parametrize(
    ("words", "place", "distribution"),
    [
        ("plan", "plan", "core/planner"),
        ("plan preset:tiny --gpus 8", "plan", "core/planner"),
        ("data prepare texts --out x", "data", "plugins/data/indexed"),
        ("generate runs/latest", "generate", "core/inference"),
        ("eval", "eval", "core/inference"),
        ("import gpt2 imported", "import", "core/engine"),
    ],
)
def test_a_command_whose_package_is_missing_says_what_to_install(
    words: str, place: str, distribution: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, *shlex.split(words)) == (
        f"no installed package has the command {place!r}; pip install -e {ROOT}/{distribution}"
    )


def test_within_a_group_the_package_of_the_group_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    catalog = discover.scan()
    kept = tuple(entry for entry in catalog.commands if entry.name != "data")
    monkeypatch.setattr(command_groups, "scan", lambda kind: Catalog((), (), kept))
    said = refused(capsys, "data", "prepare", "texts")
    assert said.startswith("no installed package has the command 'data prepare'; pip install ")
    assert said.endswith("plugins/data/indexed")
    assert main(["data", "cahe"]) == ExitCode.INPUT
    assert "did you mean 'cache'?" in capsys.readouterr().err
    assert main(["data", "--help"]) == 0
    assert "Commands of megatron-run-engine " in capsys.readouterr().out


@pytest.mark.usefixtures("nothing")
def test_help_has_what_every_installation_has(capsys: Output) -> None:
    assert main(["--help"]) == 0
    words = {line.split()[0] for line in capsys.readouterr().out.partition("Commands:\n")[2].splitlines()}
    assert words == {"checkpoint", "completion", "config", "doctor", "finetune", "plugins", "schedule", "train"}
    assert not words & {name.partition(".")[0] for name in KNOWN_COMMANDS}


@pytest.mark.parametrize("words", ["plugins info --help", "preset:tiny --help", "train --help", "--version"])
def test_the_command_lines_own_are_found_without_a_scan(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    def scan(kind: str) -> Catalog:
        raise AssertionError("scanned")

    monkeypatch.setattr(command_groups, "scan", scan)
    assert main(words.split()) == 0
    assert capsys.readouterr().out


def test_only_what_is_typed_is_imported(site: FakeSite, capsys: Output) -> None:
    offer(site, "acme-mine", "mine", source="raise ValueError('imported')")
    assert main(["data", "prepare", "--help"]) == 0
    assert main(["plugins", "list"]) == 0
    assert "imported" not in capsys.readouterr().err


def test_completing_a_command_imports_none_of_our_own_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_command(entry: Entry) -> click.Command:
        raise AssertionError(f"{entry} was imported")

    monkeypatch.setattr(loaded_command, "load_command", load_command)
    completed = Bash(program, {}, "megatron-run", VARIABLE).get_completions([], "e")
    assert [item.value for item in completed] == ["eval", "export"]


def test_lists_ask_a_package_of_another_release(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    found = discover.scan(kind="command").commands
    others = tuple(replace(entry, version="7.0", requires_kernel=">=7") for entry in found if entry.name == "plan")
    monkeypatch.setattr(command_groups, "scan", lambda kind: Catalog((), (), others))
    assert main(["--help"]) == 0
    captured = capsys.readouterr()
    assert "  plan " not in captured.out
    assert "the command 'plan' of megatron-run-planner 7.0 does not fit this kernel" in captured.err
