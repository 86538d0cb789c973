"""``megatron-run completion``: the script by which a shell completes what is typed."""

from __future__ import annotations

from contextlib import suppress

import click

from megatron_run_cli.command_groups import example
from megatron_run_cli.completion.shells import SHELLS, script
from megatron_run_cli.output import tell


@click.command(epilog=example("completion bash"))
@click.argument("shell", type=click.Choice(list(SHELLS)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script by which SHELL completes what you type.

    It knows commands, options, plugins, keys and values. Keep it where the shell looks for it, and open a new shell:

    \b
    bash   megatron-run completion bash > ~/.local/share/bash-completion/completions/megatron-run
           without the package bash-completion: > ~/.megatron-run.bash, and in ~/.bashrc: . ~/.megatron-run.bash
    zsh    megatron-run completion zsh > ~/.zsh/_megatron-run
           with, before compinit in ~/.zshrc: fpath=(~/.zsh $fpath)
    fish   megatron-run completion fish > ~/.config/fish/completions/megatron-run.fish

    The options of installed plugins are learned too, which takes seconds. Type it again after installing or changing
    others.
    """  # noqa: D301  # click wants the character, not its name
    from megatron_run.registry.discover import scan
    from megatron_run_cli.completion.vocabulary import learn

    with suppress(OSError):  # without the cache there are completions of all but the options of plugins
        if learn(scan()):
            tell("the options of the installed plugins are known to completion now")
    click.echo(script(shell, context.find_root().command), nl=False)
