"""Every mistake on the command line, with plugins, configuration or topology: its exit code and its one line.

``names`` is what the line must say whatever its words; ``mistakes.txt`` has the line as it reads, so that a change of
words is seen in review. After a change that is meant, put the line that pytest shows there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_run import __version__
from megatron_run.registry.discover import Catalog, scan
from megatron_run_cli.main import main
from tests.support.broken import write_broken
from tests.support.fake_plugins import FakeSite
from tests.support.forked import forked_command
from tests.support.plugin_file import schedule_file

Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> FakeSite:
    """The folder of everything broken holds a ``site`` of distributions."""
    folder = tmp_path_factory.mktemp("bench")
    schedule_file(folder / "quits.py", actions="raise SystemExit('no solver is installed')")
    return write_broken(folder)


@pytest.fixture
def here(bench: FakeSite, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within that folder, and its distributions installed."""
    monkeypatch.chdir(bench.folder.parent)
    with bench.importable():
        yield


#: Name of a mistake -> its line without the program's name; the folder of everything broken is written as ``.``.
LINES = dict(
    row.split(" | ", 1) for row in Path(__file__).with_name("mistakes.txt").read_text(encoding="utf-8").splitlines()
)


class Mistake(NamedTuple):
    """What is typed after ``megatron-run preset:tiny --dry-run``, its exit code, and what its line names."""

    typed: str
    code: int
    names: str
    environment: tuple[str, str] | None = None


#: Among what is installed there, the built-in schedule is shadowed: most rows name another.
PLAIN = "--plugin schedule=megatron-run-core:sequential"
ONE_STAGE = "--plugin schedule=1f1b --set parallel.pipeline=1"
INTERLEAVED = "--plugin schedule=interleaved"

COMMAND = {
    "an option that is a key": Mistake("--lr 1e-3", 2, "type --set train.lr=VALUE"),
    "an option that is a kind": Mistake("--optimizer adamw", 2, "type --plugin optimizer=NAME"),
    "an option that nothing is like": Mistake("--frobnicate", 2, "--frobnicate"),
    "the command after a configuration": Mistake("train", 2, "the command 'train' comes first"),
    "a configuration misspelt": Mistake("bounded.yam", 2, "did you mean 'bounded.yaml'?"),
    "a preset without its word": Mistake("laptop", 2, "type preset:laptop"),
    "a preset that is none": Mistake("preset:tinny", 2, "did you mean 'tiny'?"),
    "a plugin without its kind": Mistake("1f1b", 2, "type --plugin schedule=1f1b"),
    "a key without a value": Mistake(f"{PLAIN} --set train.lr", 2, "write as train.lr=1e-4"),
    "no rank": Mistake("--nproc 0", 2, "--nproc"),
    "a word for a number of ranks": Mistake("--nproc many", 2, "neither a number of ranks nor gpus"),
    "a word for a count": Mistake("--max-restarts often", 2, "is not a whole number"),
    "a section for a value": Mistake(f"{PLAIN} --set train=3", 2, "write train.KEY"),
    "a section misspelt": Mistake(f"{PLAIN} --set trian.lr=1", 2, "did you mean 'train'?"),
    "a key of another kind": Mistake(f"{PLAIN} --set scaler.growth_factor=2", 2, "scaler.growth_factor"),
    "a choice that is none": Mistake(f"{PLAIN} --set train.precision=fp8", 2, "'fp32', 'bf16' or 'fp16'"),
    "a device that is none": Mistake(f"{PLAIN} --set run.device=gpu", 2, "'auto', 'cpu' or 'cuda'"),
    "a number that is text": Mistake(f"{PLAIN} --set train.steps=many", 2, "must be"),
    "a number below its bound": Mistake(f"{PLAIN} --set train.micro_batch_size=0", 2, "at least 1"),
    "a span without its unit": Mistake(f"{PLAIN} --set train.lr_warmup=1epoch", 2, "is not a span"),
    "a duration without its unit": Mistake(f"{PLAIN} --set run.time_limit=4x", 2, "run.time_limit"),
}

PLUGINS = {
    "two distributions offer one name": Mistake("--plugin schedule=twin", 3, "choose --plugin schedule=acme-one:twin"),
    "a built-in is shadowed": Mistake("--plugin schedule=sequential", 3, "schedule=megatron-run-core:sequential"),
    "an unknown name": Mistake("--plugin schedule=interleavd", 3, "did you mean 'interleaved'?"),
    "an unknown kind": Mistake(f"{PLAIN} --plugin shedule=1f1b", 2, "did you mean 'schedule'?"),
    "a distribution without it": Mistake("--plugin schedule=acme:1f1b", 3, "megatron-run-schedule-1f1b:1f1b"),
    "a kind chosen twice": Mistake(f"--plugin schedule=1f1b {INTERLEAVED}", 2, "(from --plugin schedule=1f1b and "),
    "an option given twice": Mistake(f"{PLAIN} --plugin optimizer=adamw,eps=1,eps=2", 2, "optimizer.eps"),
    "no such file": Mistake("--plugin schedule=./none.py", 3, "./none.py"),
    "an import that calls sys.exit": Mistake("--plugin schedule=./exits.py", 3, "SystemExit: 3"),
    "an import that raises": Mistake("--plugin schedule=./raises.py", 3, "KeyError: 'half a plugin'"),
    "another major of the kernel": Mistake("--plugin schedule=future", 3, "megatron-run-core>=9"),
    "a newer minor of the kernel": Mistake("--plugin schedule=newer", 3, "megatron-run-core<0.100,>=0.99"),
    "a misspelt hook": Mistake("--plugin schedule=./misspelt.py", 3, "megatron_run_create_shedule; did you mean"),
    "an unknown hook argument": Mistake("--plugin schedule=./colour.py", 3, "has no argument 'colour'"),
    "a factory that returns None": Mistake("--plugin schedule=./nothing.py", 3, "returned None"),
    "a factory that returns the wrong type": Mistake("--plugin schedule=./number.py", 3, "of type int"),
    "a factory with the wrong signature": Mistake("--plugin schedule=./signature.py", 3, "TypeError: "),
    "plugins that do not fit each other": Mistake("--plugin schedule=./needy.py", 3, "add --plugin optimizer=zero1"),
    "a word that is neither": Mistake("plugin", 2, "did you mean 'plugins'?"),
}

CONFIGURATION = {
    "bytes that are not UTF-8": Mistake(f"{PLAIN} --set run.folder=caf\udce9", 2, "run.folder"),
    "a file of a task that is missing": Mistake(f"{PLAIN} --set eval.tasks=lambada=none.txt", 5, "none.txt"),
    "an option typo": Mistake("--plugin schedule=./depth.py,dept=2", 2, "did you mean 'depth'?"),
    "an option of the wrong type": Mistake(
        "--plugin schedule=./depth.py --set schedule.depth=deep", 2, "(from --set schedule.depth)"
    ),
    "an option out of bounds, environment": Mistake(
        "",
        2,
        "schedule.depth=4: it must be at most 3 (from environment MEGATRON_RUN_PLUGIN_SCHEDULE)",
        ("MEGATRON_RUN_PLUGIN_SCHEDULE", "./depth.py,depth=4"),
    ),
    "an option out of bounds, file": Mistake("bounded.yaml", 2, "(from bounded.yaml line 3 column 3)"),
    "a key typo, environment": Mistake(
        PLAIN,
        2,
        "unknown key train.lrr (from environment MEGATRON_RUN_SET); did you mean 'lr'?",
        ("MEGATRON_RUN_SET", "train.lrr=1"),
    ),
    "a wrong type, file": Mistake(f"typed.yaml {PLAIN}", 2, "(from typed.yaml line 2 column 3)"),
    "an unknown key, file": Mistake(f"unknown.yaml {PLAIN}", 2, "(from unknown.yaml line 2 column 3)"),
    "a rule misspelt": Mistake(f"{PLAIN} --set optimizer.rule=torch.optim:Adagard", 2, "did you mean 'Adagrad'?"),
    "a rule of no module": Mistake(
        f"{PLAIN} --set optimizer.rule=mega_extras.lion:Lion", 2, "install what holds it, or name a file"
    ),
    "a number beyond any memory": Mistake(f"{PLAIN} --set model.hidden_size=1000000000", 2, "lower model.hidden_size"),
    "a number beyond 64 bits": Mistake(f"{PLAIN} --set train.steps=99999999999999999999", 2, "train.steps="),
    "a list that is too short": Mistake(
        f"{PLAIN} --set optimizer.betas=0.9", 2, "optimizer.betas=[0.9]: it has too few values"
    ),
    "a duplicate key": Mistake("duplicate.yaml", 2, "duplicate.yaml:3:3: "),
    "a tab": Mistake("tab.yaml", 2, "tab.yaml:2:1: "),
    "a tag": Mistake("tag.yaml", 2, "tag.yaml:2:7: "),
    "an alias bomb": Mistake("bomb.yaml", 2, "bomb.yaml:4:"),
    "deep nesting": Mistake("deep.yaml", 2, "deep.yaml:1:24: "),
    "ten megabytes": Mistake("huge.yaml", 2, "huge.yaml:1:1: "),
    "a directive": Mistake("directive.yaml", 2, "directive.yaml:1:1: "),
    "a missing file": Mistake("none.yaml", 2, "none.yaml"),
}

TOPOLOGY = {
    "interleaved with one stage": Mistake(
        f"{INTERLEAVED} --set parallel.pipeline=1", 2, "(from --set parallel.pipeline); choose --plugin schedule=1f1b"
    ),
    "interleaved with one chunk": Mistake(
        f"{INTERLEAVED} --set parallel.chunks=1", 2, "(from --set parallel.chunks); choose --plugin schedule=1f1b"
    ),
    "microbatches": Mistake(f"{INTERLEAVED} --set train.global_batch_size=6", 2, "(from --set train.global"),
    "global batch": Mistake(f"{ONE_STAGE} --set train.global_batch_size=3", 2, "set train.global_batch_size to 2 or 4"),
    "layers": Mistake(f"{INTERLEAVED} --set model.num_layers=6", 2, " and --set model.num_layers); "),
    "layer counts": Mistake(f"{INTERLEAVED} --set parallel.layers=1,1", 2, "give 4"),
    "first stage": Mistake(
        f"{INTERLEAVED} --set parallel.first_stage_layers=6", 2, "set parallel.first_stage_layers to 4, or"
    ),
    "heads": Mistake(f"{PLAIN} --set model.num_heads=3", 2, "model.num_heads=3"),
    "vocabulary": Mistake(f"{PLAIN} --set model.vocab_size=7", 2, "set it to at least 128"),
    "world": Mistake("--plugin schedule=1f1b --nproc 3", 2, "(--nproc 2)"),
    "pipeline unserved": Mistake(f"{PLAIN} --set parallel.pipeline=2", 2, "parallel.pipeline=2"),
    "chunks unserved": Mistake(
        "--plugin schedule=1f1b --set parallel.chunks=2", 2, "choose --plugin schedule=gpipe or --plugin schedule="
    ),
    "tensor unserved": Mistake(f"{PLAIN} --set parallel.tensor=2", 2, "parallel.tensor=2"),
    "sequence unserved": Mistake(f"{PLAIN} --set parallel.sequence=true", 2, "parallel.sequence=true"),
    "no experts": Mistake(f"{PLAIN} --set parallel.expert=2 --nproc 2", 2, "parallel.expert=2"),
    "dropped": Mistake("--plugin schedule=./dropped.py", 3, "F1.0"),
    "duplicated": Mistake("--plugin schedule=./duplicated.py", 3, "stage 0, action 2: B0.0"),
    "out of order": Mistake("--plugin schedule=./disordered.py", 3, "stage 0, action 0: B0.0"),
    "deadlock": Mistake("--plugin schedule=./deadlock.py --set parallel.pipeline=2", 3, "stage 1, action 1: F1.0"),
    "illegal at one count of a ramp-up": Mistake(
        "--plugin schedule=./sometimes.py --set train.ramp_up.start=2 --set train.ramp_up.increment=2 "
        "--set train.ramp_up.samples=16",
        3,
        "stage 0: B0.0",
    ),
    "a schedule that crashes": Mistake("--plugin schedule=./crashes.py", 3, "ZeroDivisionError"),
    "a schedule that calls sys.exit": Mistake(
        "--plugin schedule=./quits.py", 3, "SystemExit: no solver is installed (quits.py, line "
    ),
}
MISTAKES = COMMAND | PLUGINS | CONFIGURATION | TOPOLOGY


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_one_line_and_its_exit_code(
    name: str, bench: FakeSite, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    typed, code, names, environment = MISTAKES[name]
    if environment:
        monkeypatch.setenv(*environment)
    assert main(["preset:tiny", *typed.split(), "--dry-run"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("megatron-run: ")
    assert names in line
    told = line.removeprefix("megatron-run: ").replace(str(bench.folder.parent), ".")
    told = re.sub(r"installed: [^;]*", "installed: ...", told.replace(__version__, "VERSION"))
    assert f"{name} | {told}" == f"{name} | {LINES.get(name)}"


def test_every_line_belongs_to_a_mistake() -> None:
    assert list(LINES) == list(MISTAKES)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("an import that calls sys.exit", "SystemExit: 3"),
        ("an import that raises", "KeyError: 'half a plugin'"),
        ("a schedule that crashes", "ZeroDivisionError: division by zero"),
    ],
)
def test_debug_shows_the_whole_cause(name: str, cause: str, capsys: Output) -> None:
    typed, code, names, _ = MISTAKES[name]
    assert main(["preset:tiny", *typed.split(), "--dry-run", "--debug"]) == code
    *traceback, line = capsys.readouterr().err.splitlines()
    assert traceback[0] == "Traceback (most recent call last):"
    assert cause in traceback
    assert names in line


def test_a_plugin_that_ends_a_command_by_itself_is_no_success(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    for status in ("no licence", 0, None):
        monkeypatch.setattr("megatron_run_cli.reports.listing.scan", lambda status=status: sys.exit(status))
        assert main(["plugins", "list"]) == 3
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.startswith("megatron-run: a plugin ended the command: SystemExit: ")
        assert told.err.count("\n") == 1
        assert Path(__file__).name in told.err
    assert [main([word]) for word in ("--help", "--version")] == [0, 0]
    capsys.readouterr()


@pytest.mark.usefixtures("here")
def test_several_mistakes_are_a_line_each_and_debug_shows_the_cause_of_each(capsys: Output) -> None:
    typed = "preset:tiny --plugin schedule=./exits.py --plugin scaler=./raises.py --set optimizer.eps=0 --dry-run"
    assert main(typed.split()) == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("megatron-run: ") for line in lines)
    assert main([*typed.split(), "--debug"]) == 3
    *traceback, a, b, c = capsys.readouterr().err.splitlines()
    assert [a, b, c] == lines
    assert {"SystemExit: 3", "KeyError: 'half a plugin'"} <= {line.strip(" |") for line in traceback}


@pytest.mark.parametrize("words", [[], ["--dry-run"]])
def test_a_misspelt_key_is_known_before_torch_is_imported(words: list[str]) -> None:
    typed = ["preset:tiny", "--set", "train.step=3", *words]
    code = f"import sys; from megatron_run_cli.main import main; print(main({typed!r}), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"
    assert done.stderr.endswith("unknown key train.step (from --set train.step); did you mean 'steps'?\n")


def test_checking_a_plugin_that_needs_options_says_what_to_type(capsys: Output) -> None:
    assert main(["plugins", "check", "model=gpt"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert "model=gpt cannot be tried without model.num_layers, model.hidden_size, model.num_heads" in line
    typed = line.partition("; add ")[2].replace("model.num_heads=...", "model.num_heads=2").replace("...", "4")
    assert main(["plugins", "check", "model=gpt", *typed.split()]) == 0


def test_the_same_distribution_on_two_paths_is_a_warning(tmp_path: Path, capsys: Output) -> None:
    sites = [FakeSite(tmp_path / name) for name in ("first", "second")]
    for site in sites:
        site.schedule("zigzag")
    with sites[1].importable(), sites[0].importable():
        assert main(["preset:tiny", "--plugin", "schedule=zigzag", "--dry-run"]) == 0
    (notice,) = (line for line in capsys.readouterr().out.splitlines() if "acme-zigzag is installed twice" in line)
    assert f"1.0 in {sites[0].folder} is used, 1.0 in {sites[1].folder} is ignored" in notice


def test_plugins_that_are_broken_and_not_chosen_harm_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    site = FakeSite(tmp_path)
    for number, source in enumerate(("import sys; sys.exit(3)", "1/0", "def", "import os; os._exit(9)")):
        site.schedule(f"broken{number}", source, distribution=f"acme-broken{number}")
    with site.importable():
        assert main(["preset:tiny", "--dry-run"]) == 0
        mine = Catalog(tuple(entry for entry in scan().entries if entry.name.startswith("broken")))
        # The others need not be imported, each in a process of its own.
        monkeypatch.setattr("megatron_run_cli.reports.listing.scan", lambda: mine)
        assert main(["plugins", "list", "schedule", "--check"]) == 0
    listed = capsys.readouterr().out
    assert listed.count("BROKEN") == 4
    assert "importing it ended the process with code 9" in listed


@pytest.mark.nightly  # every plugin is imported in a process of its own
def test_the_doctor_finds_a_plugin_that_is_broken(tmp_path: Path, capsys: Output) -> None:
    site = FakeSite(tmp_path)
    site.schedule("broken", "1/0", distribution="acme-broken")
    with site.importable():
        assert main(["doctor"]) == 3
    assert capsys.readouterr().out.count("BROKEN") == 1


@pytest.mark.parametrize("name", ["deadlock", "interleaved with one stage"])
def test_the_command_starts_nothing_and_leaves_nothing(name: str, bench: FakeSite, tmp_path: Path) -> None:
    typed, code, names, _ = MISTAKES[name]
    words = typed.replace("./", f"{bench.folder.parent}/").split()
    done = forked_command(("preset:tiny", *words), tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("megatron-run: ")
    assert names in line
    assert not list(tmp_path.iterdir())
