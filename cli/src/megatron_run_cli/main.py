"""The program: its commands, and how every mistake becomes one line and an exit code.

What a command needs is imported in its body, so that ``plugins list`` loads neither torch nor anything heavy.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

import click

from megatron_run import __version__
from megatron_run.errors import ExitCode, PluginError, RunError
from megatron_run.errors.install_hint import check_installed
from megatron_run.errors.machine_limits import system_limit
from megatron_run_cli.command_groups import example_of
from megatron_run_cli.commands.checkpoint import checkpoint
from megatron_run_cli.commands.completion import completion
from megatron_run_cli.commands.config import config
from megatron_run_cli.commands.doctor import doctor
from megatron_run_cli.commands.plugins import plugins
from megatron_run_cli.commands.schedule import schedule
from megatron_run_cli.commands.train import finetune, train
from megatron_run_cli.completion.shells import VARIABLE, answer
from megatron_run_cli.grammar import Program, joined, option_meant
from megatron_run_cli.output import print_refusal, start_answer, tell_error
from megatron_run_cli.streams import check_folder, full_disk
from megatron_run_cli.termination import Terminated


@click.group(cls=Program, context_settings={"help_option_names": ["-h", "--help"]}, subcommand_metavar="[COMMAND] ...")
@click.version_option(__version__, message="megatron-run %(version)s")
def program() -> None:
    """Train transformer language models the Megatron way; every technique is a plugin.

    \b
    megatron-run [CONFIG...] [OPTIONS]   train; default CONFIG: preset:laptop
    megatron-run train --help            the options of a training
    megatron-run COMMAND ...             one of the commands below
    """  # noqa: D301  # click wants the character, not its name


for _command in (
    train,
    finetune,
    config,
    plugins,
    schedule,
    checkpoint,
    doctor,
    completion,
):
    program.add_command(_command)


#: What click calls numbers -> what we do.
_NUMBERS = {"integer": "a whole number", "float": "a number"}
_VALID = re.compile(r"a valid (integer|float)( range)?")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, or tell a shell how it may go on; the exit code. Only a bug shows a traceback."""
    if asked := os.environ.get(VARIABLE):
        return answer(program, asked)
    return _obey(list(sys.argv[1:] if arguments is None else arguments))


def _obey(words: list[str]) -> int:
    start_answer()
    try:
        check_folder()
        code = program.main(args=words, prog_name="megatron-run", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:  # a group of commands, and none of them named
        click.echo(error.format_message(), err=True)
        return int(ExitCode.INPUT)
    except click.NoSuchOption as error:
        meant = option_meant(error.option_name)
        message = f"there is no option {error.option_name}; {meant}" if meant else error.format_message()
        return _refused(message, ExitCode.INPUT, words)
    except click.ClickException as error:
        return _refused(_refusal(error), ExitCode.INPUT, words)
    except RunError as error:
        return _refused(str(error), error.exit_code, words, error)
    except ModuleNotFoundError as error:
        return _without_package(error, words)
    except (click.Abort, KeyboardInterrupt, Terminated) as error:  # before RuntimeError: an Abort is one
        code = ExitCode.SIGTERM if isinstance(error, Terminated) else ExitCode.SIGINT
        return _refused(_ended(error), code, words, error)
    except (MemoryError, OSError, RuntimeError) as error:
        known = system_limit(error) or full_disk(error)
        if known is None:
            raise
        return _refused(str(known), known.exit_code, words, error)
    except SystemExit:  # how click ends when nobody reads, as in `plugins list | head -1`; `Program` has any other
        return int(ExitCode.DONE)
    return int(code or 0)


def _refusal(error: click.ClickException) -> str:
    """The words for what click refuses, in one line; where something is missing, with a command that has it."""
    message = " ".join(_VALID.sub(lambda found: _NUMBERS[found[1]], error.format_message()).split())
    if not isinstance(error, click.MissingParameter) or error.ctx is None:
        return message
    typed = example_of(error.ctx.command)
    return f"{message.rstrip('.')}. Type, as an example: {typed}" if typed else message


def _ended(error: BaseException) -> str:
    """The end of a command, and how it goes on where that is noted; click's Abort is caused by a KeyboardInterrupt."""
    notes = getattr(error, "__notes__", ()) or getattr(error.__cause__, "__notes__", ())
    return "; ".join((str(error) or "interrupted", *notes))


def _refused(message: str, code: ExitCode, words: Sequence[str], cause: BaseException | None = None) -> int:
    """Say why nothing was done, with ``--json`` as a run that ended says it, and return the exit code."""
    if code is ExitCode.INPUT and (meant := joined(words)):
        message = meant
    if code in (ExitCode.SIGINT, ExitCode.SIGTERM) and sys.stderr.isatty():
        click.echo(err=True)  # the terminal has written ^C, maybe behind a bar
    tell_error(message, cause if "--debug" in words else None)
    if "--json" in words:
        print_refusal({"exit_code": int(code), "retry": code.retry, "message": message, "folder": None})
    return int(code)


def _without_package(missing: ModuleNotFoundError, words: Sequence[str]) -> int:
    """Say that the command needs the engine, or another package of ours; any other module that is missing is a bug."""
    try:
        check_installed(missing, "this command cannot run")
    except PluginError as error:
        return _refused(str(error), error.exit_code, words, missing)
    raise missing
