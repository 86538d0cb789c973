"""``megatron-run generate``: texts that a model writes."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from megatron_run.errors import DataError, InputError
from megatron_run.files.safe_folder import parse_json
from megatron_run_cli.command_groups import example
from megatron_run_cli.grammar import json_option, rank_options, step_option
from megatron_run_cli.output import print_json, show_piece, tell
from megatron_run_cli.streams import typed_text
from megatron_run_inference.commands.chat import ANEW, BETWEEN, END, ChatOptions, chat_options, greeting, lines_typed

if TYPE_CHECKING:
    from megatron_run.config.request import Request
    from megatron_run.planning import ResolvedRun
    from megatron_run_inference.loaded_model import LoadedModel
    from megatron_run_inference.source import Source
    from megatron_run_inference.text_stream import Completion
    from megatron_run_inference.writing import Writing


@click.command(epilog=example("generate runs/latest 'Once upon a time'"))
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@step_option("MODEL")
@click.option(
    "--prompts",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="More prompts: one a line, or the strings of a JSON list in a file named .json.",
)
@chat_options
@click.option("--max-new-tokens", type=int, default=128, metavar="N", help="Most tokens of a text [default: 128].")
@click.option(
    "--temperature", type=float, default=0.8, metavar="T", help="Below 1: likelier tokens; 0: the likeliest [0.8]."
)
@click.option("--top-k", type=int, default=0, metavar="K", help="Only the K likeliest tokens; 0: all [default: 0].")
@click.option(
    "--top-p", type=float, default=1.0, metavar="P", help="Only the likeliest tokens that reach P together [1.0]."
)
@click.option(
    "--repetition-penalty", type=float, default=1.0, metavar="R", help="Above 1: no token so easily again [1.0]."
)
@click.option("--stop", multiple=True, metavar="TEXT", help="End a text before TEXT; repeatable.")
@click.option("--stop-token", "stop_tokens", type=int, multiple=True, metavar="ID", help="End at a token; repeatable.")
@click.option("--past-end", is_flag=True, help="Go on after the tokenizer's end of a text.")
@click.option("--num", type=int, default=1, metavar="N", help="Texts for each prompt [default: 1].")
@click.option("--seed", type=int, default=0, metavar="N", help="Of the random choices [default: 0].")
@click.option("--tokens", "as_tokens", is_flag=True, help="Prompts and texts are token ids, as '1 2 3'.")
@click.option(
    "--no-cache", "cache", is_flag=True, default=True, flag_value=False, help="Read the text anew each token."
)
@rank_options
@json_option
def generate(
    request: Request,
    model: Path,
    prompts: tuple[str, ...],
    *,
    step: int | None,
    file: Path | None,
    chat: ChatOptions | None,
    as_tokens: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Continue PROMPTs with a trained model, or answer with --chat.

    MODEL is a run folder, one of its saved steps, an imported folder, or a folder of another program that an installed
    format reads, as huggingface; or hf:ORG/NAME[@REVISION] of the Hugging Face Hub. Without a PROMPT it is read from
    standard input; at a terminal, line by line.
    """
    from megatron_run_inference.network import plan
    from megatron_run_inference.writing import Writing

    if prompts and not model.exists() and Path(prompts[0]).is_dir():
        typed = f"megatron-run generate {quote(prompts[0])} {quote(str(model))}"
        raise InputError(f"the prompt {str(model)!r} is in the place of the model", fix=f"type: {typed}")
    writing = Writing(**options)
    asked = [*prompts, *_read_prompts(file)]
    given: list[Any] = [_ids(prompt) for prompt in asked] if as_tokens else asked
    if chat is not None:
        chat.check(writing, as_tokens=as_tokens)
    source = read_source(model, step, request)
    run = plan(source, request)
    if chat is not None:
        chat.check(writing, as_tokens=as_tokens, ranks=run.sizes.world)
        chat.hold(load_here(run, source), writing, asked, as_json=as_json)
        return
    loops = not asked and sys.stdin.isatty()
    if loops and (run.sizes.world > 1 or as_json or as_tokens):
        raise InputError("no prompt is given", why="the loop at a terminal is for text, one process, no --json")
    if not asked and not loops:
        typed = typed_text().removesuffix("\n")
        given = [_ids(typed) if as_tokens else typed]
    streams = len(given) * writing.num == 1 and not as_json and not as_tokens
    if run.sizes.world > 1:
        where = {"path": str(source.path), "step": step}
        texts = _on_ranks(run, where, given, writing, streams=streams)
    else:
        loaded = load_here(run, source)
        if loops:
            _loop(loaded, writing)
            return
        texts = _here(loaded, given, writing, streams=streams)
    if as_json:
        print_json({"model": str(source.path), "step": source.step, "texts": [asdict(text) for text in texts]})
    elif not streams:
        click.echo(f"\n{BETWEEN}\n".join(text.ids if as_tokens else str(text) for text in texts))


def read_source(model: Path, step: int | None, request: Request) -> Source:
    """The model at ``model``, once the words of ``request`` are known to be right: every byte of it is compared.

    Tells what reading it lost, as an import does.
    """
    from megatron_run.planning import check_keys
    from megatron_run.registry.fetching import local_folder
    from megatron_run_inference.source import find_source

    check_keys(request)

    source = find_source(local_folder(model, tell).expanduser(), step)
    for note in source.notes:
        tell(note)
    return source


def load_here(run: ResolvedRun, source: Source) -> LoadedModel:
    """The model of ``source`` in this process."""
    from megatron_run_engine.host.process import assign_device, start_device
    from megatron_run_engine.runtime.world import World
    from megatron_run_inference.loaded_model import LoadedModel

    world = assign_device(run, World())
    start_device(run, world.device)
    loaded = LoadedModel(run, source, world)
    _tell_caches(caches=loaded.network.caches)
    return loaded


def _here(model: LoadedModel, prompts: Sequence[Any], writing: Writing, *, streams: bool) -> list[Completion]:
    """Write in this process; with ``streams`` show the one text as it comes."""
    if not streams:
        return model.write(prompts, writing)
    page = model.start(prompts, writing)  # an error comes before the prompt is shown
    show_piece(prompts[0])
    for _, piece in page.pieces():
        show_piece(piece)
    click.echo()
    return page.completions()


def _on_ranks(
    run: ResolvedRun,
    where: dict[str, Any],
    prompts: Sequence[Any],
    writing: Writing,
    *,
    streams: bool,
) -> list[Completion]:
    """Write on local ranks."""
    from megatron_run_engine.launch import LaunchOptions, RankTask, run_task
    from megatron_run_inference.text_stream import Completion

    with tempfile.TemporaryDirectory(prefix="megatron-run-generate-") as folder:
        result = Path(folder) / "texts.json"
        arguments = {**where, "prompts": prompts, "writing": asdict(writing), "stream": streams, "result": str(result)}
        task = RankTask("megatron_run_inference.generating", arguments)
        run_task(run, task, LaunchOptions(quiet=not streams, tell=tell))
        answer = json.loads(result.read_text(encoding="utf-8"))
    if streams:
        click.echo()
    _tell_caches(caches=answer["caches"])
    return [Completion(**text) for text in answer["texts"]]


def _loop(model: LoadedModel, writing: Writing) -> None:
    """Read lines and continue the text with each, until the end of the input."""
    how = f"{ANEW} starts anew, an empty line goes on, {END} or Ctrl-D ends"
    tell(f"{greeting(model)}: what you type is continued; {how}")
    text: list[int] = []
    for line in lines_typed():
        if line == ANEW:
            text = []
            continue
        text += model.encode(f"\n{line}" if line else line) if text else model.encode_prompt(line)
        page = model.start([text[-model.positions :]], writing)
        for _, piece in page.pieces():
            show_piece(piece)
        click.echo()
        (written,) = page.completions()
        text += written.tokens


def _tell_caches(*, caches: bool) -> None:
    if not caches:
        tell("the layers of this model keep nothing of earlier tokens: the text is read anew for each token")


def _read_prompts(file: Path | None) -> list[str]:
    """The lines of a file, or the strings of a JSON list; none without a file.

    Raises :class:`DataError` for what is neither.
    """
    from megatron_run_engine.data.user_files import read_text, text_lines

    if file is None:
        return []
    path = file.expanduser()
    try:
        if path.suffix == ".json":
            found = parse_json(read_text(path, "--prompts"))
        else:
            found = [line for _, line in text_lines(path, "--prompts") if line.strip()]
    except ValueError as error:
        raise DataError(f"{file} cannot be read", why=" ".join(str(error).split()), origin="--prompts") from error
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise DataError(f"{file} is no list of strings", origin="--prompts", fix='write ["one", "two"]')
    if not found:
        raise DataError(f"{file} holds no prompt", origin="--prompts")
    return found


def _ids(prompt: str) -> list[int]:
    tokens = prompt.replace(",", " ").split()
    if wrong := [token for token in tokens if not token.isdecimal()]:
        raise InputError(f"{wrong[0]!r} is no token id", origin="--tokens", fix="write ids as in '1 2 3'")
    return [int(token) for token in tokens]
