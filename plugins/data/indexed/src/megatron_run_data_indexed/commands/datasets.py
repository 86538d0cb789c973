"""``megatron-run data``: from texts to datasets, and what is in them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Any

import click

from megatron_run.errors import refuse_taken
from megatron_run_cli.command_groups import Commands, example
from megatron_run_cli.completion import words as places
from megatron_run_cli.grammar import json_option, naming, overwrite_option, workers_option
from megatron_run_cli.output import print_json, print_table, tell
from megatron_run_cli.progress import progress_bar
from megatron_run_data_indexed.commands.data_inputs import TOKENIZER, Texts, inputs_of, texts_options, tokenizer_option

_PATH = click.Path(path_type=Path)


class _DataCommand(click.Command):
    """A command whose ``--tokenizer`` is what the engine knows as ``data.tokenizer``."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; its errors name what was typed."""
        with naming({"data.tokenizer": "--tokenizer" if ctx.params.get("tokenizer") else "the dataset's .json"}):
            return super().invoke(ctx)


class _Data(Commands):
    command_class = _DataCommand


@click.group(cls=_Data)
def data() -> None:
    """Prepare, inspect and convert datasets; train tokenizers."""


@data.command(epilog=example("data prepare 'texts/*.txt' --out texts --tokenizer tokenizer.json"))
@click.option("--out", required=True, type=_PATH, metavar="PREFIX", help="Write PREFIX.bin, PREFIX.idx, PREFIX.json.")
@tokenizer_option(required=True, help=TOKENIZER)
@texts_options()
@click.option(
    "--end-of-document", "end", metavar="TOKEN", help="The token after each document, or none [the tokenizer's own]."
)
@workers_option
@overwrite_option
@click.option("--dry-run", is_flag=True, help="Tokenise a sample, and tell what all of it would come to.")
@json_option
def prepare(
    *,
    texts: Texts,
    out: Path,
    tokenizer: str,
    end: str | None,
    workers: int,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Tokenise INPUTs into the dataset PREFIX.

    --plugin data=indexed trains on it. INPUT is a file, a folder or a pattern: JSON lines (.jsonl), text (.txt,
    .md), each also .gz or .zst, and .parquet; or a dataset of the Hugging Face Hub: hf:ORG/NAME[@REVISION], with
    /FILES for some of it. Killed at any moment, the same command goes on where it stopped.
    """
    from megatron_run_data_indexed.megatron_order import split_bounds
    from megatron_run_data_indexed.options import IndexedOptions
    from megatron_run_data_indexed.preparation import prepare as preparation

    job = preparation.Preparation(texts.inputs, out, tokenizer, texts.reading, end, workers)
    if dry_run:
        totals = preparation.estimate(job)
    else:
        with progress_bar(job.size) as progress:
            totals = preparation.prepare(
                job, overwrite=overwrite, tell=tell, progress=lambda made: progress(made.size, made.tokens)
            )
    if as_json:
        print_json({**vars(totals), "files": len(job.inputs), "prefix": str(out), "dry_run": dry_run})
        return
    about = "about " if dry_run else ""
    click.echo(
        f"{out}: {about}{totals.tokens:,} tokens in {about}{totals.documents:,} documents of {len(job.inputs):,} "
        f"files; {totals.empty:,} empty and {totals.malformed:,} malformed records"
        + (f"; {totals.lost:,} characters, for which {tokenizer} has no token, are left out" if totals.lost else "")
    )
    if dry_run:
        size = preparation.bytes_needed(job, totals)
        click.echo(
            f"about {totals.seconds / workers:,.0f} s with {workers} processes, and {size / 1e6:,.1f} MB on disk"
        )
    else:
        first, last = split_bounds(IndexedOptions.model_fields["split"].default, totals.documents)[1]
        whole = "" if first < last else " --set data.split=1,0,0  # --separator makes more documents, for validation"
        chosen = quote(f"data=indexed,paths={out},tokenizer={tokenizer}")
        click.echo(f"train: megatron-run --plugin {chosen}{whole}")


@data.command(epilog=example("data clean 'texts/*.txt' --out clean.jsonl --tokenizer tokenizer.json"))
@click.option("--out", required=True, type=_PATH, metavar="FILE", help="The .jsonl to write, also .gz or .zst.")
@tokenizer_option(required=True, help=f"What counts tokens: {TOKENIZER}")
@click.option(
    "--min-tokens", type=click.IntRange(min=0), default=128, show_default=True, metavar="N", help="Remove shorter ones."
)
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="Remove longer ones.")
@click.option("--language", "languages", multiple=True, metavar="CODE", help="Keep only this one, as en; repeatable.")
@click.option(
    "--similarity",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.7,
    show_default=True,
    metavar="S",
    help="Remove what is so similar to an earlier one (Jaccard).",
)
@click.option("--keep-duplicates", is_flag=True, help="Compare none.")
@click.option(
    "--test",
    "tests",
    multiple=True,
    metavar="INPUT",
    help="Remove what shares words with it; repeatable.",
    shell_complete=places.any_path,
)
@click.option(
    "--ngram", type=click.IntRange(min=1), default=8, show_default=True, metavar="N", help="Words of an n-gram."
)
@click.option(
    "--shared", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="How many n-grams."
)
@texts_options()
@workers_option
@overwrite_option
@json_option
def clean(  # noqa: PLR0913  # one argument an option
    *,
    texts: Texts,
    out: Path,
    tokenizer: str,
    min_tokens: int,
    max_tokens: int | None,
    languages: tuple[str, ...],
    similarity: float,
    keep_duplicates: bool,
    tests: tuple[str, ...],
    ngram: int,
    shared: int,
    workers: int,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write the documents of INPUTs that are worth training on.

    Beside them stands why each other one is not. A document goes that is too short, in another language, holds
    words of a test set, or is nearly equal to an earlier one: the rules of the Megatron-LM paper. INPUTs are as
    `data prepare` reads them.
    """
    from megatron_run_data_indexed.preparation import clean as cleaning
    from megatron_run_data_indexed.preparation.document_rules import Rules

    rules = Rules(min_tokens, max_tokens, frozenset(languages), shared, ngram, None if keep_duplicates else similarity)
    test_sets = tuple(inputs_of(tests, texts.form)[0])
    job = cleaning.Cleaning(texts.inputs, out, tokenizer, rules, texts.reading, test_sets, workers)
    with progress_bar(job.size) as bar:
        report = cleaning.clean(job, overwrite=overwrite, progress=lambda made: bar(made.size, made.kept.tokens))
    if as_json:
        print_json({**asdict(report), "out": str(out), "why": str(job.removed)})
        return
    rows = [(rule, f"{tally.documents:,}", f"{tally.tokens:,}") for rule, tally in sorted(report.removed.items())]
    rows.append(("kept", f"{report.kept.documents:,}", f"{report.kept.tokens:,}"))
    print_table([("", "documents", "tokens"), *rows])
    click.echo(
        f"{out}; why the others went: {job.removed}; {report.malformed:,} malformed, {report.empty:,} empty records"
    )


@data.command(
    "train-tokenizer", epilog=example("data train-tokenizer 'texts/*.txt' --vocab-size 32000 --out tokenizer.json")
)
@click.option("--vocab-size", required=True, type=click.IntRange(min=1), metavar="N", help="The most ids.")
@click.option("--kind", type=click.Choice(["bpe", "wordpiece", "unigram"]), default="bpe", show_default=True)
@click.option("--out", required=True, type=_PATH, metavar="FILE", help="The tokenizer.json to write.")
@texts_options(malformed=False)
@overwrite_option
def train_tokenizer_(*, texts: Texts, vocab_size: int, kind: str, out: Path, overwrite: bool) -> None:
    """Train a tokenizer on INPUTs, and write it as JSON.

    INPUTs are as `data prepare` reads them.
    """
    from megatron_run_data_indexed.preparation import records
    from megatron_run_engine.data import train_tokenizer

    refuse_taken(out, "--out", overwrite=overwrite, inputs=(each.path for each in texts.inputs))
    size = train_tokenizer(records.texts(texts.inputs, texts.reading), kind, vocab_size, out)
    click.echo(f"{out}: {kind}, {size:,} ids")


_PREFIX = click.argument("prefix", type=_PATH)


@data.command(epilog=example("data inspect texts"))
@_PREFIX
@click.option("--samples", type=click.IntRange(min=0), default=0, metavar="N", help="Show N documents as text.")
@tokenizer_option(help=f"{TOKENIZER[:-1]} [default: what PREFIX.json names].")
@click.option("--check", "whole", is_flag=True, help="Read every token; code 5 if one is outside the vocabulary.")
@json_option
def inspect(prefix: Path, *, samples: int, tokenizer: str | None, whole: bool, as_json: bool) -> None:
    """Show what the dataset PREFIX (.bin and .idx) holds.

    Damage is told with file and byte.
    """
    from megatron_run_data_indexed.preparation import inspect as inspection
    from megatron_run_engine.data import check_ids
    from megatron_run_engine.data.indexed_files import IndexedReader

    reader = IndexedReader(prefix)
    summary = inspection.summarise(reader, prefix)
    opened = inspection.tokenizer_of(prefix, tokenizer) if samples or whole else None
    if samples and opened is None:
        raise click.UsageError(f"--samples needs --tokenizer: {prefix}.json does not name one")
    shown = inspection.samples(reader, prefix, opened, samples) if opened else []
    ids = check_ids(reader, opened.vocab_size if opened else None) if whole else None
    if as_json:
        print_json({**vars(summary), "ids": ids, "samples": [{"document": n, "text": text} for n, text, _ in shown]})
        return
    print_table(
        [
            ("documents", f"{summary.documents:,} of {summary.sequences:,} sequences"),
            ("tokens", f"{summary.tokens:,} as {summary.dtype}, {summary.size / 1e6:,.1f} MB"),
            (
                "lengths",
                f"{summary.shortest:,} to {summary.longest:,}, mean {summary.mean:,.1f}, median {summary.median:,}",
            ),
            *([("ids", f"{ids[0]:,} to {ids[1]:,}, every token read")] if ids else []),
        ]
    )
    print_table([("tokens", "documents", ""), *inspection.plot(summary.bins)])
    for number, text, cut in shown:
        click.echo(f"document {number}: {text!r}{' ...' if cut else ''}")


@data.command(epilog=example("data convert texts texts.jsonl"))
@click.argument("source", type=_PATH)
@click.argument("target", type=_PATH)
@tokenizer_option(help=f"{TOKENIZER[:-1]} [default: what SOURCE.json names].")
@click.option("--tokens", is_flag=True, help="Write token ids instead of text.")
@click.option("--key", metavar="KEY", help="Key or column [default: tokens for ids, text for text].")
@overwrite_option
@json_option
def convert(
    source: Path, target: Path, *, tokenizer: str | None, tokens: bool, key: str | None, overwrite: bool, as_json: bool
) -> None:
    """Write a dataset as JSON lines or Parquet, or the reverse.

    A file to be made a dataset holds token ids. One of SOURCE and TARGET is a dataset's prefix, the other ends in
    .jsonl, .jsonl.gz or .parquet.
    """
    from megatron_run_data_indexed.preparation import import_export as conversion
    from megatron_run_data_indexed.preparation.inspect import tokenizer_of

    if source.name.endswith(conversion.ENDINGS):
        documents, count = conversion.import_(source, target, key or "tokens", overwrite=overwrite)
        done = {"documents": documents, "tokens": count}
    else:
        refuse_taken(target, "TARGET", overwrite=overwrite, inputs=())  # no file of a dataset ends as one of these
        opened = None if tokens else tokenizer_of(source, tokenizer)
        if not tokens and opened is None:
            raise click.UsageError(f"text needs --tokenizer, as {source}.json does not name one; or add --tokens")
        kept = key or ("tokens" if tokens else "text")
        done = {"documents": conversion.export(source, target, opened, kept)}
    if as_json:
        print_json(done)
    else:
        click.echo(f"{target}: {', '.join(f'{count:,} {name}' for name, count in done.items())}")
