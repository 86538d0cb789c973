from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megatron_run.contracts import KINDS, RUN_KINDS, entry_point_group
from megatron_run.errors import ExitCode, InputError
from megatron_run.registry.discover import Catalog
from megatron_run_cli.scaffold import new
from megatron_run_testing.conformance import check

NOTHING = Catalog(())


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_package_of_every_kind_keeps_its_contract(kind: str, tmp_path: Path) -> None:
    package = new(kind, "zig-zag", tmp_path / "made", NOTHING)
    (report,) = check(str(package.folder))
    assert [result for result in report.results if not result.passed] == []
    assert report.plugin == f"{kind}=zig-zag"


@pytest.mark.parametrize("kind", KINDS)
def test_one_name_is_derived_everywhere(kind: str, tmp_path: Path) -> None:
    package = new(kind, "zig-zag", tmp_path / "made", NOTHING)
    project = tomllib.loads((package.folder / "pyproject.toml").read_text())["project"]
    module = f"megatron_run_{kind.replace('-', '_')}_zig_zag"
    assert project["name"] == package.distribution == f"megatron-run-{kind}-zig-zag"
    assert project["entry-points"] == {entry_point_group(kind): {"zig-zag": module}}
    engine = [] if kind in ("schedule", "observer") else ["megatron-run-engine>=0.1,<0.2"]
    assert project["dependencies"] == ["megatron-run-core>=0.1,<0.2", *engine]
    written = {file.relative_to(package.folder).as_posix() for file in package.folder.rglob("*") if file.is_file()}
    assert (
        written
        == set(package.files)
        == {"pyproject.toml", "README.md", f"src/{module}/__init__.py", f"tests/test_{module}.py"}
    )
    use = f"--plugin {package.choice}" if kind in RUN_KINDS else "import SOURCE FOLDER --from zig-zag"
    assert package.command == f"megatron-run {use}"
    assert package.command in (package.folder / "README.md").read_text()


def test_a_new_packages_own_test_passes(tmp_path: Path) -> None:
    package = new("schedule", "zigzag", tmp_path / "made", NOTHING)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=package.folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    assert "10 passed" in done.stdout


def test_new_packages_are_clean_code(tmp_path: Path) -> None:
    for kind in KINDS:
        new(kind, "zigzag", tmp_path / kind, NOTHING)
    config = str(Path(__file__).parents[2] / "pyproject.toml")
    for command in (["check", "--no-cache", "--ignore", "D103"], ["format", "--no-cache", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--config", config, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout


def test_the_schedule_fits_on_one_screen(tmp_path: Path) -> None:
    package = new("schedule", "zigzag", tmp_path / "made", NOTHING)
    source = (package.folder / "src" / "megatron_run_schedule_zigzag" / "__init__.py").read_text()
    assert len(source.splitlines()) < 40


def test_the_folder_is_named_like_the_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert new("observer", "best", catalog=NOTHING).folder == Path("megatron-run-observer-best")
    assert (tmp_path / "megatron-run-observer-best" / "pyproject.toml").is_file()


def refusal(kind: str, name: str, folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        new(kind, name, folder)
    assert caught.value.exit_code == ExitCode.INPUT
    return str(caught.value)


def test_an_existing_folder_is_never_written_to(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    assert refusal("schedule", "zigzag", tmp_path) == (
        f"{tmp_path} exists, and nothing is overwritten; name a new folder"
    )
    assert [file.name for file in tmp_path.iterdir()] == ["precious"]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = refusal("schedule", "zigzag", tmp_path / "file" / "inside")
    assert message.startswith(f"{tmp_path}/file/inside cannot be made: ")
    assert message.endswith("; name a folder that can be written")


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("Zig_Zag", "write zig-zag"),
        ("zig zag", "write zig-zag"),
        ("-zig--zag-", "write zig-zag"),
        ("zig/zag", "write zig-zag"),
        ("", "write a name such as zigzag"),
        ("é", "write a name such as zigzag"),
    ],
)
def test_a_bad_name_is_answered_with_a_good_one(name: str, better: str, tmp_path: Path) -> None:
    assert refusal("schedule", name, tmp_path / "made") == (
        f"{name!r} cannot name a plugin: a name is lower-case letters and digits, joined by single hyphens; {better}"
    )
    assert not (tmp_path / "made").exists()


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    assert refusal("schedule", "sequential", tmp_path / "made") == (
        "schedule=sequential is taken by megatron-run-core 0.1.0; choose another name"
    )


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    assert refusal("scheduel", "zigzag", tmp_path / "made").startswith(
        "unknown kind 'scheduel'; did you mean 'schedule'?"
    )
