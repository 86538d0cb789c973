"""``megatron-run eval``: perplexity, WikiText-103 and LAMBADA of a trained model, and what its data knew of them."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megatron_run.errors import InputError
from megatron_run.errors.install_hint import how_to_add
from megatron_run_cli.command_groups import DefaultGroup, example
from megatron_run_cli.completion import words as places
from megatron_run_cli.grammar import json_option, naming, rank_options, step_option
from megatron_run_cli.output import print_json, print_table, tell
from megatron_run_inference.commands.generate import load_here, read_source

if TYPE_CHECKING:
    from megatron_run.config.request import Request
    from megatron_run.planning import ResolvedRun
    from megatron_run_engine.evaluation.tasks import TaskResult

#: Seconds between two lines about how far an evaluation is.
_PAUSE = 10.0


class Eval(DefaultGroup):
    """``megatron-run eval RUN`` is ``megatron-run eval model RUN``."""

    default = "model"


@click.group(cls=Eval, name="eval", subcommand_metavar="MODEL --task NAME=FILE ... | overlap TEST TRAIN...")
def evaluate() -> None:
    """Evaluate a model on texts, or find them in training data.

    \b
    megatron-run eval MODEL --task perplexity=FILE    loss and perplexity of a text
    megatron-run eval model --help                    the options of an evaluation
    megatron-run eval overlap TEST TRAIN...           the share of 8-grams of TEST in TRAIN
    """  # noqa: D301  # click wants the character, not its name


@evaluate.command(epilog=example("eval model runs/latest --task perplexity=validation"))
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("others", nargs=-1, metavar="")
@click.option(
    "--task",
    "tasks",
    multiple=True,
    metavar="NAME=FILE",
    shell_complete=places.task,
    help="perplexity, wikitext or lambada of a file, or perplexity=validation of the run's data; repeatable.",
)
@step_option("MODEL")
@click.option(
    "--stride",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens scored in each window but the first [default: perplexity: all, wikitext: 32].",
)
@click.option("--batch", type=click.IntRange(min=1), default=8, metavar="N", help="Windows in a pass [default: 8].")
@rank_options
@json_option
def model(
    request: Request,
    model: Path,
    others: tuple[str, ...],
    tasks: tuple[str, ...],
    *,
    step: int | None,
    stride: int | None,
    batch: int,
    as_json: bool,
) -> None:
    """Evaluate MODEL on the texts of tasks.

    MODEL is a run folder, a saved step, an imported folder, one that a format reads, or hf:ORG/NAME. The numbers of
    a run also go to its eval.jsonl and to TensorBoard.
    """
    from megatron_run_engine.evaluation.tasks import TaskResult, check_files
    from megatron_run_inference.evaluation import record
    from megatron_run_inference.network import plan

    if others:
        raise InputError(f"{others[0]} follows the model", fix=f"type: --task perplexity={others[0]}")
    if not tasks:
        raise InputError("no task is given", fix="type: --task perplexity=FILE, wikitext=FILE or lambada=FILE")
    check_files(tasks)
    source = read_source(model, step, request)
    run = plan(source, request)
    if run.sizes.world > 1:
        given = {"path": str(source.path), "step": step, "tasks": tasks, "stride": stride, "batch": batch}
        results = [TaskResult(**each) for each in _on_ranks(run, given)]
    else:
        results = load_here(run, source).evaluate(*tasks, stride=stride, batch=batch, progress=ProgressLines())
    if as_json:
        print_json({"model": str(source.path), "step": source.step, "tasks": [asdict(each) for each in results]})
    else:
        _show(results)
    for note in dict.fromkeys(each.note for each in results if each.note):
        tell(note)
    folder = record(source, [result.at_step(source.step) for result in results])
    if folder is not None:
        tell(f"added to {folder / 'eval.jsonl'}")


@evaluate.command(epilog=example("eval overlap test.txt 'texts/*.txt'"))
@click.argument("test", type=click.Path(path_type=Path))
@click.argument("train", nargs=-1, required=True, shell_complete=places.any_path)
@json_option
def overlap(test: Path, train: tuple[str, ...], *, as_json: bool) -> None:
    """Count the 8-grams of the text TEST that texts TRAIN hold too.

    TRAIN are files, folders or patterns. Of JSON lines the texts under the key `text` count.
    """
    from megatron_run_engine.data.documents import find_documents
    from megatron_run_engine.data.overlap import overlap as count

    with naming({"data.paths": "TEST"}):
        tests = find_documents([str(test)])
    with naming({"data.paths": "TRAIN"}):
        trains = find_documents(train)
    with naming({"data.paths": ""}):  # the file is named
        texts = [(text for each in documents for text in each.texts()) for documents in (tests, trains)]
        found = count(texts[0], texts[1])
    if as_json:
        print_json({"found": found.found, "total": found.total, "share": found.share})
    else:
        click.echo(f"{found.found} of {found.total} 8-grams, {found.share:.2%}, occur in the training set")


@evaluate.command(epilog=example("eval harness runs/latest --tasks arc_easy"))
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--tasks", required=True, metavar="NAME[,NAME...]", help="Tasks of the harness.")
@click.option("--include", type=click.Path(path_type=Path), metavar="FOLDER", help="A folder with more tasks.")
@click.option("--chat", is_flag=True, help="Ask through the model's own chat template.")
@click.option("--shots", type=click.IntRange(min=0), metavar="N", help="Examples before each question [the task's].")
@step_option("MODEL")
@click.option("--batch", type=click.IntRange(min=1), default=8, metavar="N", help="Texts in a pass [default: 8].")
@rank_options
@json_option
def harness(  # noqa: PLR0913  # one argument an option
    request: Request,
    model: Path,
    tasks: str,
    *,
    include: Path | None,
    chat: bool,
    shots: int | None,
    step: int | None,
    batch: int,
    as_json: bool,
) -> None:
    """Evaluate MODEL on tasks of lm-evaluation-harness."""
    from megatron_run_inference.network import plan

    if find_spec("lm_eval") is None:
        raise InputError(
            "lm-evaluation-harness is not installed",
            fix=f"type: {how_to_add('megatron-run-inference', 'lm-eval')}",
        )
    from megatron_run_inference.harness import find_tasks, run_harness

    folder, names = None if include is None else str(include.expanduser()), tasks.split(",")
    found = find_tasks(names, folder)
    source = read_source(model, step, request)
    run = plan(source, request)
    how: dict[str, Any] = {"names": names, "shots": shots, "batch": batch, "chat": chat}
    if run.sizes.world > 1:
        results = _on_ranks(run, {"path": str(source.path), "step": step, "folder": folder, **how})
    else:
        results = run_harness(load_here(run, source), found, **how)
    if as_json:
        print_json({"model": str(source.path), "step": source.step, "tasks": results})
        return
    rows = [("task", "metric", "value")]
    for task, metrics in results.items():
        rows += [(task, name, f"{value:.4f}") for name, value in metrics.items() if isinstance(value, float)]
    print_table(rows)


class ProgressLines:
    """Says how far a long evaluation is, every ten seconds."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _PAUSE

    def __call__(self, task: str, windows: int, scored: int) -> None:
        """Say that ``scored`` of the windows of ``task`` are done, if it is time."""
        if time.monotonic() >= self._next and scored < windows:
            self._next = time.monotonic() + _PAUSE
            tell(f"{task}: {scored:,} of {windows:,} windows")


def _on_ranks(run: ResolvedRun, arguments: dict[str, Any]) -> Any:
    """Evaluate on local ranks; what the first one answers."""
    from megatron_run_engine.launch import LaunchOptions, RankTask, run_task

    with tempfile.TemporaryDirectory(prefix="megatron-run-eval-") as folder:
        result = Path(folder) / "results.json"
        task = RankTask("megatron_run_inference.evaluation", {**arguments, "result": str(result)})
        run_task(run, task, LaunchOptions(quiet=True, tell=tell))
        return json.loads(result.read_text(encoding="utf-8"))


def _show(results: list[TaskResult]) -> None:
    rows = [("task", "of", "loss", "tokens", "metrics")]
    for each in results:
        metrics = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in each.metrics.items())
        rows.append((each.task, each.source, f"{each.loss:.4f}", str(each.tokens), metrics))
    print_table(rows)
