"""The first word decides; every mistake is one line and a documented exit code."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import click
import pytest

from megatron_run_cli.grammar import Program, is_config
from megatron_run_cli.main import main, program
from tests.support.command_tree import every_command

Output = pytest.CaptureFixture[str]


@pytest.mark.parametrize("word", ["a.yaml", "b.yml", "c.json", "dir/run", "-", "preset:tiny", "./x", "preset:"])
def test_words_that_are_configurations(word: str) -> None:
    assert is_config(word)


@pytest.mark.parametrize("word", ["train", "tiny", "yaml", "a.txt", "preset"])
def test_words_that_are_not(word: str) -> None:
    assert not is_config(word)


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ([], "train"),
        (["preset:tiny"], "train"),
        (["--dry-run"], "train"),
        (["--plugin", "schedule=1f1b"], "train"),
        (["train", "a.yaml"], "train"),
        (["plugins", "list"], "plugins"),
        (["config", "show"], "config"),
        (["doctor"], "doctor"),
        (["schedule", "show"], "schedule"),
        (["--nproc", "2", "doctor"], "train"),
    ],
)
def test_the_first_word_decides(words: list[str], command: str) -> None:
    called: list[str] = []
    recording = Program("megatron-run")
    for name in program.commands:
        anything = click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)
        settings = {"ignore_unknown_options": True}
        callback = partial(record, called, name)
        recording.add_command(click.Command(name, params=[anything], callback=callback, context_settings=settings))
    recording.main(words, standalone_mode=False)
    assert called == [command]


def record(called: list[str], name: str, words: tuple[str, ...]) -> None:
    called.append(name)


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_is_the_programs_and_lists_the_commands(word: str, capsys: Output) -> None:
    assert main([word]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in ("train", "config", "plugins", "doctor"))


def test_version(capsys: Output) -> None:
    from megatron_run import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"megatron-run {__version__}\n"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["trian"], 2, "'trian' is neither a command nor a configuration; did you mean 'train'?"),
        (["tiny"], 2, "'tiny' is neither a command nor a configuration; type preset:tiny"),
        (
            ["xyzzy"],
            2,
            "commands are checkpoint, completion, config, data, doctor, eval, export, finetune, generate, import, plan",
        ),
        (["schedule", "show", "1f1b"], 2, "nor a configuration; type --plugin schedule=1f1b"),
        (["--lr", "1"], 2, "there is no option --lr; type --set train.lr=VALUE"),
        (["--global-batch-size=8"], 2, "there is no option --global-batch-size; type --set train.global_batch_size="),
        (["schedule", "show", "--parallel-layer", "te"], 2, "; type --plugin parallel-layer=NAME"),
        (["preset:tiny", "doctor"], 2, "the command 'doctor' comes first; type: megatron-run doctor ..."),
        (["--nprok", "2"], 2, "No such option '--nprok'"),
        (["--nproc", "0"], 2, "'0' is neither a number of ranks nor gpus"),
        (["--nproc"], 2, "Option '--nproc' requires an argument"),
        (["--launch", "mpi"], 2, "'mpi' is not one of 'auto', 'local', 'torchrun', 'slurm'"),
        (["--launch", "torchrun", "preset:tiny"], 2, "this process was not started by torchrun"),
        (["plugins", "lisst"], 2, "megatron-run plugins has no command 'lisst'; did you mean 'list'?"),
        (["checkpoint", "runs/mine"], 2, "no command 'runs/mine'; its commands are inspect, list, verify"),
        (["plugins", "list", "schedul"], 2, "did you mean 'schedule'?"),
        (["plugins", "info", "schedule"], 2, "'schedule' is a kind of plugins (from plugins info); name one of sched"),
        (["plugins", "info", "interleavd"], 2, "did you mean schedule=interleaved?"),
        (["plugins", "info", "te"], 2, "name parallel-layer=te or graph-capture=te"),
        (["plugins", "why", "te"], 2, "name parallel-layer=te or graph-capture=te"),
        (["plugins", "why", "schedule=interleavd"], 3, "did you mean 'interleaved'?"),
        (["plugins", "list", "interleaved"], 2, "plugins are called so; type: plugins info schedule=interleaved"),
        (["plugins", "check", "interleaved"], 2, "did you mean schedule=interleaved?"),
        (["plugins", "info", "schedule=interleavd"], 3, "did you mean 'interleaved'?"),
        (["plugins", "check", "nothing"], 2, "'nothing' is nothing to check"),
        (["plugins", "new", "schedule", "Bad Name"], 2, "'Bad Name' cannot name a plugin"),
        (["config", "explain", "train.lrr"], 2, "did you mean 'train.lr'?"),
        (["config", "explain", "lr"], 2, "there is no key 'lr'; type train.lr"),
        (
            ["--set", "sequence-length=4"],
            2,
            "(from --set sequence-length); write train.sequence_length",
        ),
        (["config", "show", "preset:tiny", "--set", "train.lrr=1"], 2, "unknown key train.lrr"),
        (["preset:tyny", "--dry-run"], 2, "did you mean 'tiny'?"),
        *(
            ([*words, option, name, value], 2, f"a space where = belongs; type {option} {name}={value}\n")
            for words, option, name, value in (
                (["preset:tiny"], "--set", "train.steps", "5"),
                (["config", "show", "preset:tiny"], "--set", "data.paths", "./texts"),
                (["plugins", "check", "schedule=1f1b"], "--set", "group_size", "4"),
                (["plan", "preset:tiny"], "--what-if", "parallel.pipeline", "2"),
                (["generate", "folder", "hello"], "--set", "run.device", "cpu"),
                (["preset:tiny"], "--plugin", "schedule", "1f1b"),
            )
        ),
        (["--set=train.steps", "5", "preset:tiny"], 2, "; type --set train.steps=5\n"),
        (["--set", "train.steps", "preset:tiny"], 2, "'train.steps' is no KEY=VALUE (from --set)"),
        (["missing.yaml", "--dry-run"], 2, "the configuration missing.yaml cannot be read"),
        (["preset:tiny", "--plugin", "schedule=none-such", "--dry-run"], 3, "none-such"),
    ],
)
def test_a_mistake_is_one_line_with_its_exit_code(words: list[str], code: int, message: str, capsys: Output) -> None:
    assert main(words) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("megatron-run: ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("group", ["plugins", "schedule", "config"])
def test_a_group_alone_lists_its_commands(group: str, capsys: Output) -> None:
    assert main([group]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"Usage: megatron-run {group} ")
    assert "megatron-run: " not in captured.err


def test_several_mistakes_are_one_line_each(capsys: Output) -> None:
    assert main(["preset:tiny", "--set", "train.lrr=1", "--set", "train.steps=x"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("megatron-run: ") for line in lines)


def test_debug_shows_the_traceback(capsys: Output) -> None:
    assert main(["preset:tiny", "--set", "train.lrr=1", "--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("megatron-run: unknown key train.lrr")


def test_a_dry_run_prints_the_resolved_run_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["preset:tiny", "--plugin", "schedule=1f1b", "--dry-run", "--nproc", "8"]) == 0
    out = capsys.readouterr().out
    assert "--plugin schedule=1f1b" in out
    assert "world 8 = tensor 1 x pipeline 2 x data 4" in out
    assert not list(tmp_path.iterdir())


def test_a_dry_run_as_json(capsys: Output) -> None:
    assert main(["preset:tiny", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plugins"]["schedule"][0]["name"] == "sequential"


def test_a_configuration_from_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("train: {steps: 77}"))
    assert main(["config", "show", "preset:tiny", "-", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["train.steps"]["value"] == 77


def test_a_byte_of_a_configuration_from_standard_input_that_is_no_text(
    monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """As it is told of a file."""
    typed = io.TextIOWrapper(io.BytesIO(b"train:\n  lr: \xff"), "utf-8", "surrogateescape")
    monkeypatch.setattr(sys, "stdin", typed)
    assert main(["-", "--dry-run"]) == 2
    assert capsys.readouterr().err == "megatron-run: standard input:2:7: a byte that is not UTF-8 is refused\n"


def test_gpus_that_are_not_there_are_an_error(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["--nproc", "gpus"]) == 2
    assert "there is no GPU on this machine" in capsys.readouterr().err


def test_output_that_nobody_reads_is_no_error() -> None:
    command = f"{sys.executable} -m megatron_run_cli plugins list | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


GROUPS = [(), *(words for words, command in every_command() if isinstance(command, click.Group))]


@pytest.mark.parametrize("group", GROUPS, ids=" ".join)
def test_the_help_of_a_group_cuts_no_summary_at_80_columns(
    group: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*group, "--help"]) == 0
    listed = capsys.readouterr().out.partition("\nCommands:\n")[2].splitlines()
    names = {words[len(group)] for words, _ in every_command() if words[:-1] == group}
    assert {line.split()[0] for line in listed} == names, "each takes one line"
    assert [line for line in listed if not line.endswith(".") or line.endswith("..")] == []


def test_a_shell_is_told_whole_summaries() -> None:
    with program.make_context("megatron-run", [], resilient_parsing=True) as context:
        found = {each.value: str(each.help) for each in program.shell_complete(context, "")}
        summaries = [found[name] for name in program.list_commands(context)]
    assert "Train with several values of some keys, and compare the runs." in summaries
    assert [text for text in summaries if text.endswith("..")] == []


NEEDY = {
    words: command
    for words, command in every_command()
    if not isinstance(command, click.Group) and any(parameter.required for parameter in command.params)
}


@pytest.mark.parametrize("path", NEEDY, ids=" ".join)
def test_a_missing_argument_is_answered_with_a_command_that_lacks_nothing(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(path)) == 2
    line = capsys.readouterr().err
    shown = f"Type, as an example: megatron-run {' '.join(path)} "
    assert line.startswith("megatron-run: Missing ")
    assert line.count("\n") == 1
    assert "\t" not in line
    assert shown in line
    command = NEEDY[path]
    words = shlex.split(line.split(shown)[1])
    with command.make_context(" ".join(path), words, resilient_parsing=False) as context:
        assert all(context.params[each.name] is not None for each in command.params if each.required and each.name)
