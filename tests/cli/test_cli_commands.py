from __future__ import annotations

import gc
import json
import runpy
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from megatron_run.contracts.plugin import COMMAND, KINDS
from megatron_run.registry.discover import Catalog, scan
from megatron_run_cli.commands import doctor
from megatron_run_cli.main import main

Output = pytest.CaptureFixture[str]

BROKEN_METADATA = "Metadata-Version: 2.1\nName: acme-broken\nVersion: 1.0\nRequires-Dist: megatron-run-core\n"


@pytest.fixture
def broken_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution on the path whose plugin cannot be imported."""
    info = tmp_path / "acme_broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(BROKEN_METADATA)
    (info / "entry_points.txt").write_text("[megatron_run.schedule]\nacme = acme_broken\n")
    (tmp_path / "acme_broken.py").write_text("raise RuntimeError('half installed')\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def as_json(capsys: Output, *words: str, code: int = 0) -> Any:
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_list_shows_every_kind_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from megatron_run_cli.main import main; main(['plugins', 'list']); "
        "print([name for name in ('torch', 'pydantic', 'rich', 'ruamel', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *table, heavy = done.stdout.splitlines()
    assert heavy == "[]"
    assert {line.split()[0] for line in table} == {*KINDS, COMMAND}


def test_list_of_one_kind(capsys: Output) -> None:
    listed = as_json(capsys, "plugins", "list", "schedule")["plugins"]
    assert {each["kind"] for each in listed} == {"schedule"}
    assert "sequential" in {each["name"] for each in listed}


def test_list_of_a_kind_without_plugins_says_so(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setattr("megatron_run_cli.reports.listing.scan", lambda: Catalog(()))
    assert main(["plugins", "list", "format"]) == 0
    assert capsys.readouterr() == ("", "megatron-run: no plugin of kind format is installed\n")


FEW = ("schedule=acme", "schedule=sequential")


def install(monkeypatch: pytest.MonkeyPatch, *few: str) -> None:
    entries = tuple(entry for entry in scan().entries if str(entry) in few)
    monkeypatch.setattr("megatron_run_cli.reports.listing.scan", lambda: Catalog(entries))


@pytest.fixture
def few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few are installed: each is imported in a process of its own."""
    install(monkeypatch, *FEW)


@pytest.mark.usefixtures("broken_plugin", "few_plugins")
def test_a_broken_plugin_is_listed_as_broken(capsys: Output) -> None:
    listed = {each["name"]: each for each in as_json(capsys, "plugins", "list", "schedule", "--check")["plugins"]}
    assert listed["acme"]["state"] == "BROKEN"
    assert "half installed" in listed["acme"]["problem"]
    assert listed["sequential"]["state"] == "ok"


@pytest.mark.usefixtures("broken_plugin")
@pytest.mark.parametrize("installed", [pytest.param("all", marks=pytest.mark.nightly), "few"])
def test_doctor_looks_at_everything_a_run_needs_and_works_with_a_broken_plugin(
    installed: str, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    if installed == "few":
        install(monkeypatch, *FEW, "graph-capture=te")
    told = as_json(capsys, "doctor", code=3)
    findings = {each["topic"]: each for each in told}
    topics = {"python", "megatron-run", "torch", "devices", "threads", "communication", "runs folder", "plugin"}
    assert topics <= findings.keys()
    assert "gloo" in findings["communication"]["text"]
    plugins = {each["text"].split()[0]: each for each in told if each["topic"] == "plugin"}
    assert plugins["schedule=acme"]["state"] == "BROKEN"
    assert plugins["schedule=sequential"]["state"] == "ok"
    if find_spec("transformer_engine") is None:
        assert plugins["graph-capture=te"]["state"] == "cannot run"
        assert "Transformer Engine, which is not installed" in plugins["graph-capture=te"]["text"]


@pytest.mark.usefixtures("few_plugins")
def test_doctor_goes_on_after_a_failure_and_says_so_with_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    def fail() -> str:
        raise OSError("a missing library\nand more")

    monkeypatch.setattr(doctor, "_torch", fail)
    assert main(["doctor"]) == 2
    *lines, blank, last = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.split()[1] == "torch")
    assert line.split(maxsplit=2) == ["FAILED", "torch", "OSError: a missing library"]
    assert lines[-1].split()[:3] == ["ok", "plugin", "schedule=sequential"]
    assert (blank, last) == ("", "no run starts until this is mended: torch")


@pytest.mark.usefixtures("few_plugins")
def test_doctor_says_that_torch_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(doctor, "_plugins", lambda _program: [])  # a rank's process imports them, and torch
    assert main(["doctor"]) == 2
    assert capsys.readouterr().out.endswith("no run starts until this is mended: torch, devices, communication\n")


@pytest.mark.usefixtures("few_plugins")
def test_libraries_of_cuda_that_do_not_load_keep_no_run_from_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    def fail() -> None:
        raise RuntimeError("importing torch and Transformer Engine took longer than 60 s")

    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("megatron_run_cli.reports.library_report.report_libraries", fail)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "cannot run  cuda" in out
    assert "no run starts" not in out


@pytest.mark.parametrize(
    ("states", "line"),
    [
        (["ok"], "all is well"),
        (
            ["ok", "cannot run"],
            "all is well; lacking a library or a device here, which only runs that choose it need: data=b",
        ),
        (
            ["AMBIGUOUS", "BROKEN", "ok", "AMBIGUOUS"],
            "broken: data=b; there twice: data=a, data=d",
        ),
    ],
)
def test_doctor_ends_with_the_whole_in_one_line(states: list[Any], line: str) -> None:
    findings = [
        doctor.Finding("plugin", state, f"data={name} (x)") for name, state in zip("abcd", states, strict=False)
    ]
    assert doctor.conclusion(findings) == line


def test_doctor_says_at_once_what_it_does(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    said = []

    def examine(program: object) -> tuple[doctor.Finding, ...]:
        said.append(capsys.readouterr().err)
        return ()

    monkeypatch.setattr(doctor, "examine", examine)
    assert main(["doctor"]) == 0
    assert "importing every plugin" in said[0]
    assert capsys.readouterr().out == "\nall is well\n"


@pytest.mark.usefixtures("few_plugins")
def test_doctor_imports_plugins_while_it_looks_at_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other here: one after the other they would not end."""
    begun, looked = Event(), Event()

    def plugins(_program: object) -> list[doctor.Finding]:
        begun.set()
        assert looked.wait(60)
        return []

    def torch() -> str:
        assert begun.wait(60)
        looked.set()
        return "here"

    monkeypatch.setattr(doctor, "_plugins", plugins)
    monkeypatch.setattr(doctor, "_torch", torch)
    assert all(each.state == "ok" for each in doctor.examine() if each.topic == "torch")


@pytest.mark.usefixtures("few_plugins")
def test_a_folder_that_cannot_be_written_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    (finding,) = (each for each in doctor.examine(tmp_path / "runs") if each.topic == "runs folder")
    assert (finding.state, finding.text) == ("FAILED", "OSError: [Errno 30] Read-only file system")


def test_info_shows_options_with_types_bounds_and_meaning(capsys: Output) -> None:
    assert main(["plugins", "info", "observer=console"]) == 0
    out = capsys.readouterr().out
    assert "observer=console" in out
    assert "plain" in out
    described = as_json(capsys, "plugins", "info", "observer=console")
    assert as_json(capsys, "plugins", "info", "console") == described, "the name is enough"
    assert described["options"][0]["name"] == "plain"
    assert described["summary"] == "", "plugins of the engine have no line of their own"
    assert main(["plugins", "info", "gpipe"]) == 0
    assert "  does      The GPipe pipeline schedule: all forwards, " in capsys.readouterr().out


def test_why_names_the_winner_its_reason_and_the_others(capsys: Output) -> None:
    words = ("plugins", "why", "schedule", "preset:tiny", "--plugin", "schedule=1f1b")
    first, *others = as_json(capsys, *words)
    assert as_json(capsys, "plugins", "why", "gpipe", *words[3:]) == [first, *others], "a plugin stands for its kind"
    assert (first["chosen"], first["plugin"]["name"], first["reason"]) == (True, "1f1b", "--plugin schedule=1f1b")
    assert "sequential" in {each["plugin"]["name"] for each in others}
    assert main(list(words)) == 0
    assert capsys.readouterr().out.startswith("chosen  1f1b")


def test_new_writes_a_package_that_passes_its_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plugins", "new", "schedule", "zigzag"]) == 0
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "try it:      megatron-run plugins check megatron-run-schedule-zigzag",
        "install it:  pip install -e 'megatron-run-schedule-zigzag[test]'",
        "test it:     pytest megatron-run-schedule-zigzag",
        "choose it:   megatron-run --plugin schedule=zigzag",
    ]
    assert main(["plugins", "check", "megatron-run-schedule-zigzag"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("schedule=zigzag")
    assert "FAILED" not in out


def test_check_of_a_plugin_that_breaks_its_contract_fails(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "bad.py").write_text(
        "from megatron_run import Action, PluginInfo, hookimpl\n"
        "from megatron_run.contracts import Schedule\n"
        "class Forgetful(Schedule):\n"
        "    def actions(self, spec):\n"
        "        return [[Action('F', m, 0) for m in range(spec.microbatches)] for _ in range(spec.stages)]\n"
        "@hookimpl\n"
        "def megatron_run_plugin_info():\n"
        "    return PluginInfo('schedule', 'bad', provides=frozenset({'parallel.pipeline'}))\n"
        "@hookimpl\n"
        "def megatron_run_create_schedule(options):\n"
        "    return Forgetful()\n"
    )
    assert main(["plugins", "check", str(tmp_path / "bad.py")]) == 3
    assert "FAILED" in capsys.readouterr().out


def test_config_show_gives_each_key_its_origin(capsys: Output) -> None:
    assert main(["config", "show", "preset:tiny", "--set", "train.lr=3"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("lr:"))
    assert line.endswith("# --set train.lr")


def test_config_explain_says_type_default_and_value(capsys: Output) -> None:
    assert main(["config", "explain", "train.lr"]) == 0
    assert "peak learning rate" in capsys.readouterr().out
    assert main(["config", "explain", "train.lr", "preset:tiny"]) == 0
    assert "0.001 (from preset:tiny line" in capsys.readouterr().out


def test_config_schema_is_a_json_schema(capsys: Output) -> None:
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert {"train", "model", "schedule"} <= schema["properties"].keys()


@pytest.mark.parametrize(
    ("environment", "rare"), [({}, True), ({"LOCAL_RANK": "0"}, False), ({"SLURM_PROCID": "0"}, False)]
)
def test_a_command_looks_for_garbage_rarely_and_a_rank_at_pythons_pace(
    environment: dict[str, str], rare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pythons = (700, 10, 10)
    for name in ("LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = gc.get_threshold()
    try:
        gc.set_threshold(*pythons)
        monkeypatch.delitem(sys.modules, "megatron_run_cli.__main__", raising=False)  # another test may import it
        runpy.run_module("megatron_run_cli.__main__", run_name="imported")
        assert (gc.get_threshold()[0] > 10 * pythons[0]) if rare else (gc.get_threshold() == pythons)
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nofile.yaml",), "nofile.yaml cannot be read"),
        (("preset:tiny", "--set", "train.step=3"), "did you mean 'steps'?"),
        (("preset:tiny", "--jsn"), "No such option"),
        (("generate", "nowhere", "text"), "nowhere"),
    ],
    ids=" ".join,
)
def test_a_refusal_is_json_too_where_json_is_asked_for(capsys: Output, words: tuple[str, ...], said: str) -> None:
    code = main([*words, "--json"])
    written = capsys.readouterr()
    told = json.loads(written.out)
    assert (told["exit_code"], told["retry"], told["folder"]) == (code, False, None)
    assert said in told["message"]
    assert told["message"] in written.err
    assert main(list(words)) == code
    assert not capsys.readouterr().out
