from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from megatron_run.contracts import KINDS, RUN_KINDS, entry_point_group
from megatron_run.errors import ExitCode, InputError
from megatron_run.planning import load_config
from megatron_run.registry.discover import Catalog
from megatron_run_cli.commands.new_package import write_package
from megatron_run_testing.conformance import check
from tests.support.checkout import ROOT

NOTHING = Catalog(())


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_package_of_every_kind_keeps_its_contract(kind: str, tmp_path: Path) -> None:
    package = write_package(kind, "zig-zag", tmp_path / "made", NOTHING)
    (report,) = check(str(package.folder))
    assert [result for result in report.results if not result.passed] == []
    assert report.plugin == f"{kind}=zig-zag"


@pytest.mark.parametrize("kind", KINDS)
def test_one_name_is_derived_everywhere(kind: str, tmp_path: Path) -> None:
    package = write_package(kind, "zig-zag", tmp_path / "made", NOTHING)
    project = tomllib.loads((package.folder / "pyproject.toml").read_text())["project"]
    module = f"megatron_run_{kind.replace('-', '_')}_zig_zag"
    assert project["name"] == package.distribution == f"megatron-run-{kind}-zig-zag"
    assert project["entry-points"] == {entry_point_group(kind): {"zig-zag": module}}
    assert project["description"] == f"Plugin {kind}=zig-zag for megatron-run."
    engine = [] if kind in ("schedule", "observer") else ["megatron-run-engine>=0.1,<0.2"]
    assert project["dependencies"] == ["megatron-run-core>=0.1,<0.2", *engine]
    written = {file.relative_to(package.folder).as_posix() for file in package.folder.rglob("*") if file.is_file()}
    assert (
        written
        == set(package.files)
        == {
            "pyproject.toml",
            "README.md",
            "LICENSE",
            ".github/workflows/test.yml",
            ".github/workflows/publish.yml",
            f"src/{module}/__init__.py",
            f"tests/test_{module}.py",
        }
    )
    use = f"--plugin {package.choice}" if kind in RUN_KINDS else "import SOURCE FOLDER --from zig-zag"
    assert package.command == f"megatron-run {use}"
    assert package.command in (package.folder / "README.md").read_text()


def test_a_new_schedule_runs_a_pipeline_by_its_name_alone(tmp_path: Path) -> None:
    package = write_package("schedule", "zigzag", tmp_path / "made", NOTHING)
    file = package.folder / "src/megatron_run_schedule_zigzag/__init__.py"
    assert load_config("preset:tiny", plugins=[f"schedule={file}"]).sizes.pipeline == 2


def test_a_new_packages_own_test_passes(tmp_path: Path) -> None:
    package = write_package("schedule", "zigzag", tmp_path / "made", NOTHING)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=package.folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    assert "11 passed" in done.stdout


def test_a_new_package_can_be_published_and_found(tmp_path: Path) -> None:
    package = write_package("graph-capture", "zigzag", tmp_path / "made", NOTHING)
    project = tomllib.loads((package.folder / "pyproject.toml").read_text())["project"]
    assert {"megatron-run-plugin", "megatron-run-graph-capture"} <= set(project["keywords"])
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    assert (package.folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    workflows = {file.stem: YAML(typ="safe").load(file.read_text()) for file in package.folder.glob(".github/*/*.yml")}
    assert set(workflows) == {"test", "publish"}
    (job,) = workflows["test"]["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [
        "python -m pip install '.[test]'",
        "python -m pytest",
    ]
    assert job["env"]["PIP_EXTRA_INDEX_URL"] == "${{ vars.PIP_EXTRA_INDEX_URL }}"
    publish = workflows["publish"]["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")


@pytest.mark.nightly
def test_a_new_package_builds_with_its_metadata(tmp_path: Path) -> None:
    package = write_package("observer", "best", tmp_path / "made", NOTHING)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "-w", str(tmp_path / "dist"), str(package.folder)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        folder = "megatron_run_observer_best-0.1.0.dist-info"
        metadata = message_from_bytes(content.read(f"{folder}/METADATA"))
        assert content.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "megatron-run-plugin" in metadata["Keywords"].split(",")


def test_new_packages_are_clean_code(tmp_path: Path) -> None:
    for kind in KINDS:
        write_package(kind, "zigzag", tmp_path / kind, NOTHING)
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
    package = write_package("schedule", "zigzag", tmp_path / "made", NOTHING)
    source = (package.folder / "src" / "megatron_run_schedule_zigzag" / "__init__.py").read_text()
    assert len(source.splitlines()) < 40


def test_the_folder_is_named_like_the_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert write_package("observer", "best", catalog=NOTHING).folder == Path("megatron-run-observer-best")
    assert (tmp_path / "megatron-run-observer-best" / "pyproject.toml").is_file()


def refusal(kind: str, name: str, folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        write_package(kind, name, folder)
    assert caught.value.exit_code == ExitCode.INPUT
    return str(caught.value)


def test_an_existing_folder_is_never_written_to(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    assert refusal("schedule", "zigzag", tmp_path) == (f"{tmp_path} exists: nothing is overwritten; name a new folder")
    assert [file.name for file in tmp_path.iterdir()] == ["precious"]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = refusal("schedule", "zigzag", tmp_path / "file" / "inside")
    assert message.startswith(f"{tmp_path}/file/inside cannot be written: ")
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
