"""The checks of a command find what its contract asks, and what it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_run_cli.commands.new_package import write_package
from megatron_run_testing.conformance import check
from tests.support.checkout import MEMBERS, Member

WITH_COMMANDS = [member for member in MEMBERS if "megatron_run.command" in member.project.get("entry-points", {})]
LIGHT, EXPLAINED, SHOWN = (
    "its module imports nothing heavy",
    "each command says in a line what it does",
    "each that needs words shows a command line that has them",
)


@pytest.mark.parametrize("member", WITH_COMMANDS, ids=str)
def test_our_own_commands_pass(member: Member) -> None:
    for name in member.project["entry-points"]["megatron_run.command"]:
        (report,) = check(f"command={name}")
        assert report.passed, report


@pytest.mark.parametrize(
    ("find", "put", "fault", "message"),
    [
        ("import json\n", "import json\nimport numpy\n", LIGHT, "imports numpy: it is imported when somebody asks"),
        ('    """List the last losses of each run in FOLDER."""\n', "", EXPLAINED, "megatron-run losses has no help"),
        (
            'epilog=example("losses runs")',
            "",
            SHOWN,
            'needs folder and has no example: add epilog=example("losses ...")',
        ),
        ("losses runs", "losses --json", SHOWN, "the example of megatron-run losses lacks folder"),
    ],
)
def test_what_a_command_lacks_is_found(find: str, put: str, fault: str, message: str, tmp_path: Path) -> None:
    package = write_package("command", "losses", tmp_path / "made")
    file = package.folder / "src" / "megatron_run_command_losses" / "__init__.py"
    text = file.read_text(encoding="utf-8")
    assert find in text
    file.write_text(text.replace(find, put), encoding="utf-8")
    (report,) = check(str(package.folder))
    assert [(each.name, message in each.message) for each in report.results if not each.passed] == [(fault, True)]


def test_a_new_package_passes_its_check(tmp_path: Path) -> None:
    package = write_package("command", "zig-zag", tmp_path / "made")
    (report,) = check(str(package.folder))
    assert report.passed, report
    assert report.plugin == "command=zig-zag"
    assert package.command == "megatron-run zig-zag runs"
