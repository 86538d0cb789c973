"""The scripts by which a shell asks for completions, and the answers to them.

click's own scripts end every completion with a space, also after ``train.lr=``, and its words for bash are cut at each
``=`` and ``:``. These give bash's line whole, and leave open what is to be gone on with.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    split_arg_string,
)

#: The program, and the variable in which a shell asks.
PROGRAM, VARIABLE = "megatron-run", "_MEGATRON_RUN_COMPLETE"
#: After one of these more is to be typed: no space follows.
OPEN_ENDS = "=/.,@:+"

_BASH = """\
%(complete_func)s() {
    local IFS=$'\\n' type value
    COMPREPLY=()
    while IFS=',' read -r type value; do
        case $type in
            plain) COMPREPLY+=("$value") ;;
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
        esac
    done < <(env COMP_WORDS="${COMP_LINE:0:COMP_POINT}" COMP_WORDBREAKS="$COMP_WORDBREAKS" \\
        %(complete_var)s=bash_complete "$1" 2>/dev/null)
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[%(open_ends)s] ]] && compopt -o nospace
    return 0
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""

_ZSH = """\
#compdef %(prog_name)s

%(complete_func)s() {
    local -a bare bare_open described described_open response
    local type key descr
    (( ! $+commands[%(prog_name)s] )) && return 1

    response=("${(@f)$(env COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) \\
        %(complete_var)s=zsh_complete %(prog_name)s 2>/dev/null)}")

    for type key descr in ${response}; do
        case $type in
            plain)
                if [[ $descr == _ && $key == *[%(open_ends)s] ]]; then bare_open+=("$key")
                elif [[ $descr == _ ]]; then bare+=("$key")
                elif [[ $key == *[%(open_ends)s] ]]; then described_open+=("$key":"$descr")
                else described+=("$key":"$descr")
                fi ;;
            dir) [[ $PREFIX == --*=* ]] && compset -P '--*='; _path_files -/ ;;
            file) [[ $PREFIX == --*=* ]] && compset -P '--*='; _path_files -f ;;
        esac
    done

    (( $#described )) && _describe -V unsorted described -U
    (( $#described_open )) && _describe -V unsorted described_open -U -S ''
    (( $#bare )) && compadd -U -V unsorted -a bare
    (( $#bare_open )) && compadd -U -V unsorted -S '' -a bare_open
    return 0
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""

_FISH = """\
function %(complete_func)s
    for completion in (env %(complete_var)s=fish_complete COMP_WORDS=(commandline -cp) \\
            COMP_CWORD=(commandline -t) %(prog_name)s 2>/dev/null)
        set -l parts (string split -m 1 "," -- $completion)
        switch $parts[1]
            case dir
                __fish_complete_directories $parts[2]
            case file
                __fish_complete_path $parts[2]
            case plain
                echo $parts[2]
        end
    end
end

complete --no-files --command %(prog_name)s --arguments "(%(complete_func)s)"
"""


class _Complete(ShellComplete):
    """The part that is the same for every shell."""

    def source(self) -> str:
        """The script."""
        return self.source_template % {**self.source_vars(), "open_ends": OPEN_ENDS}

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        """Complete words for ``incomplete``; of ``--option=value`` click itself would give the value alone."""
        option, equals, value = incomplete.partition("=")
        if not equals or not option.startswith("-"):
            return super().get_completions(args, incomplete)
        found = super().get_completions([*args, option], value)
        for item in found:
            if item.type == "plain":
                item.value = f"{option}={item.value}"
        return found


class Bash(_Complete, BashComplete):
    """bash, which replaces the part of a word after the last of ``COMP_WORDBREAKS``, unless the word is quoted.

    A ``@`` there belongs to what is replaced: readline has it begin the name of a host.
    """

    source_template = _BASH
    _kept = ""

    def get_completion_args(self) -> tuple[list[str], str]:
        """The whole words of the line before the cursor, and the word at the cursor, which may be empty."""
        line = os.environ["COMP_WORDS"]
        *words, last = split_arg_string(f"{line}x")  # without the x, a space at the end would be no word's begin
        incomplete = last[:-1]
        quoted = not line.endswith(incomplete) or line.removesuffix(incomplete)[-1:] in ("'", '"')
        breaks = "" if quoted else os.environ.get("COMP_WORDBREAKS", "")
        end = max((incomplete.rfind(each) + (each != "@") for each in breaks), default=0)
        self._kept = incomplete[:end]
        return words[1:], incomplete

    def format_completion(self, item: CompletionItem[str]) -> str:
        """The text that replaces the last part of the word."""
        value = str(item.value)
        return f"{item.type},{value.removeprefix(self._kept) if item.type == 'plain' else value}"


class Zsh(_Complete, ZshComplete):
    """zsh."""

    source_template = _ZSH


class Fish(_Complete, FishComplete):
    """fish."""

    source_template = _FISH


SHELLS: Mapping[str, type[_Complete]] = {"bash": Bash, "zsh": Zsh, "fish": Fish}


def script(shell: str, program: click.Command) -> str:
    """The script that ``shell``, one of ``SHELLS``, reads."""
    return SHELLS[shell](program, {}, PROGRAM, VARIABLE).source()


def answer(program: click.Command, asked: str) -> int:
    """Answer a shell that asked ``bash_complete`` or ``bash_source``; the exit code.

    Nobody sees a message while a line is typed: whatever fails, there are no completions.
    """
    shell, _, wanted = asked.partition("_")
    try:
        if wanted == "source":
            click.echo(script(shell, program), nl=False)
        else:
            click.echo(SHELLS[shell](program, {}, PROGRAM, VARIABLE).complete())
    except Exception:
        return 1
    return 0
