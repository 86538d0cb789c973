"""Completion: what may be typed at each place, in the three shells, at once and without a word of what goes wrong."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import FileIO
from multiprocessing.connection import wait
from pathlib import Path

import click
import pytest

from megatron_run import __version__
from megatron_run.config.presets import presets
from megatron_run.config.request import Request
from megatron_run.contracts.plugin import COMMAND, KINDS, RUN_KINDS
from megatron_run.files.latest_run import point_latest_at
from megatron_run.planning import check_keys
from megatron_run.registry import discover
from megatron_run.registry.discover import Catalog, scan
from megatron_run_cli.completion import vocabulary
from megatron_run_cli.completion.shells import SHELLS, VARIABLE, Bash, script
from megatron_run_cli.completion.vocabulary import learn, learned
from megatron_run_cli.main import main, program
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from tests.architecture.test_architecture_lazy import HEAVY, loaded_by
from tests.support.command_tree import every_command

Output = pytest.CaptureFixture[str]
Typed = Callable[[str], list[str]]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache in which the options of every installed plugin are known."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        assert learn(scan())
        yield folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a run of two saved steps, a configuration and a text."""
    monkeypatch.chdir(tmp_path)
    for step in (20, 100):
        (tmp_path / "runs" / "first" / "checkpoints" / f"step{step}").mkdir(parents=True)
    for name in ("mine.yaml", "text.txt", "text.txt.lock", "two words.yaml", "runs/first/.lock", "runs/first/.a.tmp"):
        (tmp_path / name).write_text("", encoding="utf-8")
    return tmp_path


@pytest.fixture
def typed() -> Typed:
    """The completions of a line whose last word, maybe empty, is completed: what is a file for the shell is FILE."""

    def completions(line: str) -> list[str]:
        *words, last = line.split(" ")
        found = Bash(program, {}, "megatron-run", VARIABLE).get_completions(words, last)
        return [str(each.value) if each.type == "plain" else "FILE" for each in found]

    return completions


def names(kind: str) -> list[str]:
    return [entry.name for entry in scan().of_kind(kind)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tra", ["train"]),
        ("checkpoint l", ["list"]),
        ("eval o", ["overlap", "FILE"]),
        ("--plug", ["--plugin"]),
        ("train --allow", ["--allow-change", "--allow-plugin-change"]),
        ("train --launch s", ["slurm"]),
        ("--nproc g", ["gpus"]),
        ("--nproc gpus --plug", ["--plugin"]),
        ("--plugin par", ["parallel-layer="]),
        ("--plugin schedule=inter", ["schedule=interleaved"]),
        ("--plugin=schedule=inter", ["--plugin=schedule=interleaved"]),
        ("--plugin parallel-layer=tensor+lo", ["parallel-layer=tensor+lora"]),
        ("--plugin parallel_layer=lo", ["parallel_layer=lora"]),
        ("--plugin observer=console,js", ["observer=console,jsonl"]),
        ("--plugin schedule=interleaved,gr", ["schedule=interleaved,group_size="]),
        ("--plugin schedule=interleaved,order=", []),
        ("--plugin graph-capture=compile,dynamic=t", []),
        ("--plugin nothing=", []),
        ("--set tra", ["train."]),
        ("--set train.prec", ["train.precision="]),
        ("--set train.precision=f", ["train.precision=fp32", "train.precision=fp16"]),
        ("--set checkpoint.async_save=", ["checkpoint.async_save=true", "checkpoint.async_save=false"]),
        ("--set schedule.use=inter", ["schedule.use=interleaved"]),
        ("--set parallel_layer.use=lo", ["parallel_layer.use=lora"]),
        ("--set parallel_", ["parallel_layer."]),
        ("--set parallel_layer.tar", ["parallel_layer.targets="]),
        ("--set parallel-layer.tar", ["parallel-layer.targets="]),
        ("--allow-change train.lr,parallel_layer.tar", ["train.lr,parallel_layer.targets"]),
        ("--set schedule.gr", ["schedule.group_size="]),
        ("--plugin schedule=1f1b --set schedule.gr", []),
        ("--set no.such=", []),
        ("--set run.folder=ru", ["run.folder=runs/"]),
        ("--set data.tokenizer=te", ["data.tokenizer=text.txt"]),
        ("--set run.branch_from=runs/fi", ["run.branch_from=runs/first/"]),
        ("--set run.branch_from=runs/first", ["run.branch_from=runs/first@", "run.branch_from=runs/first/"]),
        ("--set run.branch_from=runs/first@", ["run.branch_from=runs/first@100", "run.branch_from=runs/first@20"]),
        ("--set run.folder=runs/first --resume ", ["auto", "never", "100", "20"]),
        ("--resume n", ["never"]),
        ("checkpoint inspect runs/first --step ", ["100", "20"]),
        ("checkpoint inspect runs/first/checkpoints --step 1", ["100"]),
        ("checkpoint inspect --step ", []),
        ("export runs/first new --step ", ["100", "20"]),
        ("generate runs/first --step ", ["100", "20"]),
        ("generate --step ", []),
        ("--allow-change train.lr,da", ["train.lr,data", "train.lr,data."]),
        ("config explain optimizer", ["optimizer", "optimizer."]),
        ("config explain train.lr_w", ["train.lr_warmup", "train.lr_wsd", "train.lr_wsd_shape"]),
        ("preset:ti", ["preset:tiny"]),
        ("m", ["mine.yaml"]),
        ("--plugin parallel-layer=lora,targets=", []),
        ("--set parallel-layer.targets=m", []),
        ("--set data.paths=te", ["data.paths=text.txt"]),
        ("--set run.init_from=runs/f", ["run.init_from=runs/first/"]),
        ("runs/first/.", []),
        ("eval runs/first --task lambada=t", ["lambada=text.txt"]),
        ("--dry-run --device h", ["h100", "h200"]),
        ("eval runs/first --task l", ["lambada="]),
        ("eval runs/first --task perplexity=", ["perplexity=validation", "perplexity=mine.yaml", "perplexity=runs/"]),
        ("eval runs/first --task lambada=te", ["lambada=text.txt"]),
        ("--set eval.tasks=lambada=text.txt,wi", ["eval.tasks=lambada=text.txt,wikitext="]),
        ("import a b --from h", ["huggingface"]),
        ("export a b --to d", ["distributed"]),
        ("plugins info format=m", ["format=megatron"]),
        ("plugins check mi", ["mine.yaml"]),
        ("finetune gpt2 --task squ", ["squad1", "squad2"]),
        ("data prepare te", ["FILE"]),
        ("data prepare text.txt --tokenizer b", ["bytes"]),
        ("completion z", ["zsh"]),
    ],
)
def test_words_that_may_follow(line: str, expected: list[str], typed: Typed, folder: Path) -> None:
    found = typed(line)
    if line.endswith("perplexity="):
        found.remove("perplexity=text.txt")
    assert found == expected


def test_kinds_names_and_presets_are_all_there(typed: Typed) -> None:
    assert typed("--plugin ") == [f"{kind}=" for kind in RUN_KINDS]
    assert typed("plugins list ") == [*KINDS, COMMAND]
    for kind in RUN_KINDS:
        assert typed(f"--plugin {kind}=") == [f"{kind}={name}" for name in names(kind)]
    assert set(typed("preset:")) == {f"preset:{name}" for name in presets()}


def test_every_command_and_option_is_completed(typed: Typed) -> None:
    """And nobody sees an error: words of every parameter of every command can be asked for."""

    for words, command in every_command():
        assert words[-1] in typed(" ".join(words))
        line = f"{' '.join(words)} "
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.is_flag:
                assert set(parameter.opts) <= set(typed(f"{line}--")), words
                typed(f"{line}{parameter.opts[0]} ")
        typed(line)


def test_the_steps_are_those_that_the_engine_finds(typed: Typed, folder: Path) -> None:
    for odd in ("step7.removing", "step", "stepx", "latest"):
        (folder / "runs" / "first" / "checkpoints" / odd).mkdir()
    found = typed("checkpoint verify runs/first --step ")
    assert sorted(map(int, found)) == Checkpoints(folder / "runs" / "first" / "checkpoints").steps()


def test_latest_has_the_steps_of_the_run_that_it_names(typed: Typed, folder: Path) -> None:
    run = folder / "runs" / "20260101-000000-abcd"
    (run / "checkpoints" / "step7").mkdir(parents=True)
    point_latest_at(run)
    assert typed("checkpoint inspect --step ") == ["7"]
    assert typed("checkpoint inspect runs/latest --step ") == ["7"]
    assert typed("checkpoint inspect runs/latest/checkpoints --step ") == ["7"]
    assert typed("--set run.folder=runs/latest --resume ") == ["auto", "never", "7"]
    assert typed("--set run.branch_from=runs/latest@") == ["run.branch_from=runs/latest@7"]


def test_every_choice_of_a_key_is_accepted() -> None:
    """A word that completion proposes is one that the key's own type reads."""
    vocabulary = learned(scan())
    assert len(vocabulary.keys) > 70
    chosen = {name: word for name, word in vocabulary.keys.items() if word.choices}
    for name, word in chosen.items():
        for choice in word.choices:
            check_keys(Request((), (f"{name}={choice}",), (), None))


def test_options_of_a_plugin_that_is_another_now_are_not_proposed() -> None:
    catalog = scan()
    newer = tuple(replace(entry, version="9") if entry.name == "interleaved" else entry for entry in catalog.entries)
    assert "schedule=interleaved" in learned(catalog).options
    assert "schedule=interleaved" not in learned(replace(catalog, entries=newer)).options


def test_the_command_learns_options_that_changed_while_the_plugin_kept_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """Of one plugin: each that is installed is imported anew."""
    few = Catalog(tuple(entry for entry in scan().entries if entry.name == "interleaved"))
    monkeypatch.setattr(discover, "scan", lambda: few)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert learn(few)
    kept = tmp_path / "megatron-run" / "completion" / "keys.json"
    content = json.loads(kept.read_text(encoding="utf-8"))
    del content["plugins"]["schedule=interleaved"][1]["group_size"]
    kept.write_text(json.dumps(content), encoding="utf-8")
    assert "group_size" not in learned(scan()).options["schedule=interleaved"]
    assert main(["completion", "bash"]) == 0
    assert "group_size" in learned(scan()).options["schedule=interleaved"]
    assert "are known to completion now" in capsys.readouterr().err


def test_without_what_was_learned_there_are_the_keys_of_the_kernel(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert typed("--set train.prec") == ["train.precision="]
    assert typed("--set schedule.gr") == []


@pytest.mark.parametrize(
    "content",
    [
        '{"version": "0"',
        '{"version": "0"}',
        json.dumps({"version": __version__}),
        json.dumps({"version": __version__, "keys": [], "plugins": {}}),
        json.dumps({"version": __version__, "keys": {}, "plugins": {"schedule=1f1b": "x"}}),
        json.dumps({"version": __version__, "keys": {"train.lr": ["a", "b"]}, "plugins": {}}),
        json.dumps({"version": __version__, "keys": {"train.lr": ["a", [1], "c"]}, "plugins": {}}),
    ],
)
def test_a_damaged_file_of_what_was_learned_is_none(
    content: str, typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = tmp_path / "megatron-run" / "completion" / "keys.json"
    kept.parent.mkdir(parents=True)
    kept.write_text(content, encoding="utf-8")
    assert typed("--set train.prec") == ["train.precision="]


@pytest.mark.parametrize("line", ["--plugin schedule=interleaved,", "--set train.lr", "tra", "m", "eval x --"])
def test_nothing_heavy_is_imported(line: str) -> None:
    asked = {"COMP_WORDS": f"megatron-run {line}", VARIABLE: "bash_complete"}
    loaded = loaded_by(f"import os; os.environ |= {asked}\nfrom megatron_run_cli.main import main\nassert main() == 0")
    assert not loaded & HEAVY


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("line", ["checkpoint nothing x", "--set 'no.such=", "--plugin schedule=,,,=", "--set ~no/x"])
def test_mistakes_are_silent(shell: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setenv(VARIABLE, f"{shell}_complete")
    monkeypatch.setenv("COMP_WORDS", f"megatron-run {line}")
    words = line.split(" ")
    monkeypatch.setenv("COMP_CWORD", words[-1] if shell == "fish" else str(len(words)))
    assert main() in (0, 1)
    said = capsys.readouterr()
    assert said.out.strip() == said.err == ""


@pytest.mark.parametrize("asked", ["tcsh_complete", "bash_nothing", "bash", "1"])
def test_what_no_shell_asks_is_silent_too(asked: str, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setenv(VARIABLE, asked)
    assert main() == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("shell", SHELLS)
def test_the_command_prints_the_script(shell: str, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setattr(vocabulary, "learn", lambda _: True)  # a process that imports every plugin, for each shell
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert printed == script(shell, program)
    monkeypatch.setenv(VARIABLE, f"{shell}_source")
    assert main() == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(("shell", "words"), [("bash", ["-n"]), ("zsh", ["-n"]), ("fish", ["--no-execute"])])
def test_the_shell_reads_the_script(shell: str, words: list[str], tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    file = tmp_path / "script"
    file.write_text(script(shell, program), encoding="utf-8")
    done = subprocess.run([shell, *words, file], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tra", ["train"]),
        ("--plugin schedule=inter", ["--plugin", "schedule=interleaved"]),
        ("--plugin=schedule=inter", ["--plugin=schedule=interleaved"]),
        ("--plugin schedule=interleaved,gr", ["--plugin", "schedule=interleaved,group_size="]),
        ("--set 'train.prec", ["--set", "train.precision="]),
        ("--set run.branch_from=runs/first@1", ["--set", "run.branch_from=runs/first@100"]),
        ("preset:ti", ["preset:tiny"]),
        ("checkpoint list ru", ["checkpoint", "list", "runs/"]),
        ("checkpoint list two", ["checkpoint", "list", "two words.yaml"]),
    ],
)
def test_bash_completes(line: str, words: list[str], folder: Path) -> None:
    """In a terminal: the line, the key Tab, and then its words, each in brackets."""
    (folder / "bash").write_text(script("bash", program), encoding="utf-8")
    shown = in_bash(". ./bash", f"megatron-run {line}\t\x01printf '<%s>' \x05 'EN''D'\n")
    assert "".join(f"<{word}>" for word in ("megatron-run", *words)) in shown


def in_bash(before: str, keys: str) -> str:
    """What bash shows in a terminal, after the command ``before``, for ``keys``, by which at last it prints <END>."""
    ours, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with (
        os.fdopen(ours, "r+b", buffering=0) as screen,
        subprocess.Popen(
            ["bash", "--norc", "--noprofile", "-i"],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=environment,
            start_new_session=True,
        ) as child,
    ):
        os.close(terminal)
        try:
            screen.write(f"HISTFILE= PS1='<PRO''MPT>'; {before}\n".encode())
            _read_until(screen, "<PROMPT>")
            screen.write(keys.encode())
            return _read_until(screen, "<END>")
        finally:
            child.kill()


def _read_until(screen: FileIO, end: str) -> str:
    shown = ""
    while end not in shown:
        assert wait([screen.fileno()], 60), shown
        shown += screen.read(4096).decode()
    return shown
