"""``megatron-run generate --chat``: a conversation with a model, at a terminal or line by line from elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megatron_run.errors import InputError, locate
from megatron_run_cli.grammar import Command, with_options
from megatron_run_cli.output import print_json_line, show_piece, tell, tell_error
from megatron_run_cli.streams import typed_lines

if TYPE_CHECKING:
    from megatron_run_inference.conversation import Conversation
    from megatron_run_inference.loaded_model import LoadedModel
    from megatron_run_inference.writing import Writing

#: What a line must be to start anew in a loop, and to end it.
ANEW, END = "/new", "/exit"
#: What stands between texts where several are printed.
BETWEEN = "---"

_OPTIONS = (
    click.option("--chat", is_flag=True, help="PROMPTs are turns of one conversation, by the model's chat template."),
    click.option("--system", metavar="TEXT", help="What the model reads before all turns of --chat."),
    click.option(
        "--template", type=click.Path(path_type=Path), metavar="FILE", help="Another Jinja template for --chat."
    ),
)


@dataclass(frozen=True)
class ChatOptions:
    """A conversation that is asked for: its system prompt, and the file of a template that is not the model's."""

    system: str | None
    template: Path | None

    def check(self, writing: Writing, *, as_tokens: bool, ranks: int = 1) -> None:
        """Raise :class:`InputError` for what a conversation cannot have, DataError for a template that is not there."""
        excess = {"--tokens": as_tokens, "--num": writing.num > 1, "several ranks": ranks > 1}
        for what in (name for name, there in excess.items() if there):
            why = "a conversation is text, by one process, with one answer a turn"
            raise InputError(f"--chat and {what} do not go together", why=why, fix=f"leave out --chat, or {what}")
        _ = self._source

    @cached_property
    def _source(self) -> str | None:
        """The source of the template, None for the model's own."""
        from megatron_run_engine.data.chat_template.template import read_template

        return None if self.template is None else read_template(self.template.expanduser(), "--template")

    def hold(self, model: LoadedModel, writing: Writing, asked: list[str], *, as_json: bool) -> None:
        """Answer the turns that were ``asked``, else those of standard input. Raises what ``model`` does."""
        from megatron_run_inference.conversation import Conversation

        talk = Conversation(model, writing, self.system, self._source, tell)
        if asked or as_json or not sys.stdin.isatty():
            _by_lines(talk, asked or typed_lines(), as_json=as_json)
        else:
            _at_terminal(talk)


def chat_options(command: Command) -> Command:
    """Give ``command`` the options of a conversation, as one argument ``chat``, None where none is asked for."""

    @wraps(command)
    def with_chat(*, chat: bool, system: str | None, template: Path | None, **others: Any) -> Any:
        alone = next((name for name, value in (("system", system), ("template", template)) if value is not None), None)
        if alone and not chat:
            raise InputError(f"--{alone} is for a conversation", fix="add --chat")
        return command(chat=ChatOptions(system, template) if chat else None, **others)

    return with_options(with_chat, *_OPTIONS)


def lines_typed() -> Iterator[str]:
    """The lines that somebody types at the terminal, until they end."""
    while True:
        try:
            line = input("> ")
        except EOFError:
            click.echo()
            return
        if line.strip() == END:
            return
        yield line


def greeting(model: LoadedModel) -> str:
    """Whom somebody at the terminal talks to."""
    return f"{model.source.path}, which reads {model.positions:,} tokens"


def _at_terminal(talk: Conversation) -> None:
    """Answer each line until the end of the input. What cannot be answered is told, and is not part of the talk."""
    tell(f"{greeting(talk.model)}: each line is answered; {ANEW} starts anew, {END} or Ctrl-D ends")
    for line in lines_typed():
        if line.strip() == ANEW:
            talk.forget()
        elif line.strip():
            try:
                _answer(talk, line)
            except InputError as error:
                tell_error(str(error))


def _answer(talk: Conversation, turn: str) -> None:
    """Show the answer to ``turn`` as it comes, and what has cut it short."""
    answer = talk.ask(turn, show_piece)
    click.echo()
    if limit := talk.limit_of(answer):
        tell(f"the answer is cut by {limit}")


def _by_lines(talk: Conversation, lines: Iterable[str], *, as_json: bool) -> None:
    """Answer ``lines``, a turn each: texts with ``---`` between them, or one JSON object a line.

    A turn that cannot be answered ends it, by its number: later ones would go on with what was not said.
    """
    number = 0
    for number, turn in enumerate(filter(str.strip, (line.removesuffix("\n") for line in lines)), 1):
        try:
            if as_json:
                print_json_line({**asdict(talk.ask(turn)), "prompt": turn})
            else:
                if number > 1:
                    click.echo(BETWEEN)
                _answer(talk, turn)
        except InputError as error:
            locate(error, f"turn {number}")
            raise
    if not number:
        raise InputError("nothing was said to the model", fix='name a PROMPT, or pipe lines: echo "Hello" | ...')
