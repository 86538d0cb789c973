"""Inputs that are wrong in one place: each gets one line and its documented code before any step, within seconds."""

from __future__ import annotations

import contextlib
import io
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_run.config.request import Request
from megatron_run_cli.main import main
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from tests.campaigns.figures import Figures, campaign, some
from tests.campaigns.kills import LAST, request
from tests.support.broken import write_broken, write_broken_in_a_run
from tests.support.forked import run_forked, tiny

#: Every key with its type and bounds: ``train.lr | number | above 0 | 0.00015``.
OPTIONS = Path(__file__).parents[1] / "kernel" / "contracts" / "options.txt"
#: Sections that belong to no plugin.
SECTIONS = ("run", "train", "parallel", "eval", "checkpoint", "guard")
#: Types that the word below is not.
TYPED = re.compile(r"int|number|true or false|one of .*|auto or int|span|time")
#: Seconds that an answer may take.
PROMPT = 3.0


@dataclass(frozen=True)
class Input:
    """What is typed after ``megatron-run``, its exit code, and a variable; or what a run is asked for."""

    typed: tuple[str, ...]
    code: int
    fault: str = ""
    asked: Request | None = None

    def __str__(self) -> str:
        return f"{' '.join(self.typed)}{self.fault}" if self.asked is None else str(self.asked)


def inputs(folder: Path) -> Iterator[Input]:
    """Every one; files are written into ``folder``."""
    yield from _values()
    for name in ("duplicate", "unknown", "typed", "tab", "tag", "bomb", "deep", "huge", "directive", "missing"):
        yield Input(("preset:tiny", f"./{name}.yaml", "--dry-run"), 2)
    for text in ("rank", "at=send", "kind=kill", "at=sned,kind=kill", "at=send,kind=kil", "rank=9,at=send,kind=kill"):
        yield Input(("preset:tiny", "--dry-run"), 2, text)
    (folder / "empty.txt").touch()
    (folder / "binary").write_bytes(b"\0\1")
    for name, target in (("broken.txt", "nowhere"), ("loop.txt", "loop.txt")):
        (folder / name).symlink_to(target)
    for number, name in enumerate(("empty.txt", "absent.txt", "empty.txt/x", "binary", "broken.txt", "loop.txt")):
        place = {"run.folder": str(folder / f"run-{number}"), "run.device": "cpu", "run.threads": 1}
        data = f"data=text,paths={folder / name}"
        yield Input((), 5, asked=Request(("preset:tiny",), plugins=(data,), values=place, nproc=1))
    for name, (word, code) in write_broken_in_a_run(folder).items():
        if name not in ("moves", "stateless"):  # only an update shows these: a step is done
            yield Input((), code, asked=tiny(folder / f"with-{name}", plugins=[word], nproc=1))
    for words in ("traim", "preset:tinny", "--set lr", "--plugin model", "--nproc zero", "--resume soon", "--nprocs 2"):
        yield Input((*words.split(), "--dry-run"), 2)
    for command in ("list", "verify", "inspect"):
        yield Input(("checkpoint", command, "nowhere"), 5)
    for words, code in WITHOUT_A_MODEL.items():
        yield Input(tuple(words.split()), code)
    yield from _run_folders(folder)


def _values() -> Iterator[Input]:
    """Values that their keys refuse."""
    rows = [[cell.strip() for cell in line.split("|")] for line in OPTIONS.read_text().splitlines()]
    for key, kind, bounds, _ in rows:
        if key.count(".") > 1 or key.partition(".")[0] not in SECTIONS:
            continue
        if TYPED.fullmatch(kind):
            yield Input(("preset:tiny", "--set", f"{key}=banana", "--dry-run"), 2)
        for outside in _outside(bounds):
            yield Input(("preset:tiny", "--set", f"{key}={outside}", "--dry-run"), 2)
        yield Input(("preset:tiny", "--set", f"{key[:-1]}={'1'}", "--dry-run"), 2)
    for key, number in LARGE:
        yield Input(("preset:tiny", "--set", f"{key}={number}", "--dry-run"), 2)


#: Numbers beyond anything that can be planned or made.
LARGE = (
    *(("model.hidden_size", number) for number in ("1000000000", "1e12", "1e18")),
    *(("model.num_layers", number) for number in ("1e9", "1e18")),
    *(("train.global_batch_size", number) for number in ("8000000000000", "8e15")),
    *(
        (key, "99999999999999999999")
        for key in ("train.steps", "train.sequence_length", "eval.batches", "data.samples")
    ),
    ("model.experts.count", "1e12"),
)


#: What is asked of models, steps and plugins that are not there, and values that no generation has.
WITHOUT_A_MODEL = {
    "generate nowhere x": 5,
    "eval nowhere --task perplexity=x": 5,
    "eval overlap nowhere x": 5,
    "finetune nowhere --data x": 5,
    "export nowhere out --to huggingface": 5,
    "import nowhere out": 5,
    "plugins check data=nowhere": 3,
    "plugins check data=./nowhere.py": 3,
    "generate nowhere x --top-p 2": 2,
    "generate nowhere x --temperature nan": 2,
    "generate nowhere x --num 100000000000000": 2,
}


def _outside(bounds: str) -> Iterator[str]:
    """A value beyond each bound: ``at least 1, below 8`` -> 0, 8."""
    for word, number in re.findall(r"(at least|above|below|at most) ([0-9.]+)", bounds):
        yield {"at least": f"-{number}" if float(number) else "-1", "at most": f"{number}1"}.get(word, number)


def _run_folders(folder: Path) -> Iterator[Input]:
    """Places where no run can be."""
    (folder / "file").touch()
    (folder / "full").mkdir()
    (folder / "full" / "results.txt").touch()
    (folder / "garbage").mkdir()
    (folder / "garbage" / "run.json").write_bytes(b"\x80\x04K*.")
    (folder / "elsewhere").symlink_to("/")
    for name in ("file", "full", "garbage", "elsewhere", "file/below"):
        yield Input((), 2, asked=tiny(folder / name, nproc=1))


class Malformed:
    """Types each input into the command's own entry point, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        write_broken(folder)
        self._folder = folder
        self.inputs = list(inputs(folder))
        run = Input((), 0, asked=tiny(folder.parent / "first", nproc=1))
        for first in (Input(("preset:tiny", "--dry-run"), 0), run):
            assert self._type(first)[0] == first.code  # what is imported at first is not counted
        self.slowest = 0.0

    def trial(self, index: int) -> Sequence[str]:
        """What was not as promised of one input."""
        asked, start = self.inputs[index], time.monotonic()
        code, said = self._type(asked)
        seconds = time.monotonic() - start
        self.slowest = max(self.slowest, seconds)
        faults = [] if code == asked.code else [f"exit code {code} in the place of {asked.code}"]
        faults += [] if _is_one_line(said) else [f"it said {said!r}"]
        faults += [f"it took {seconds:.1f} s"] if seconds > PROMPT else []
        faults += ["it trained"] if list(self._folder.rglob("metrics.jsonl")) else []
        return [f"{asked}: {each}" for each in faults]

    def _type(self, asked: Input) -> tuple[int, str]:
        """The exit code, and what is said: by the command, or by the launcher of a run."""
        if asked.asked is not None:
            ran = run_forked(asked.asked)
            return ran.code, f"megatron-run: {ran.message}\n"
        said, before = io.StringIO(), Path.cwd()
        os.chdir(self._folder)
        if asked.fault:
            os.environ["MEGATRON_RUN_FAULT"] = asked.fault
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                return main(asked.typed), said.getvalue()
        finally:
            os.environ.pop("MEGATRON_RUN_FAULT", None)
            os.chdir(before)


def _is_one_line(said: str) -> bool:
    return said.count("\n") == 1 and said.startswith("megatron-run: ") and "Traceback" not in said


def malformed(folder: Path, share: float = 1.0) -> Figures:
    """What is typed and written wrongly."""
    trials = Malformed(folder)
    figures = campaign(
        "a malformed input: one line, the documented code, no step", trials.trial, some(len(trials.inputs), share)
    )
    figures.notes.append(f"the slowest answer took {trials.slowest:.1f} s")
    return figures


#: What is done to a saved step, and what the line must name.
DAMAGE: dict[str, Callable[[Path], Path]] = {}


def _damages(name: str) -> Callable[[Callable[[Path], Path]], Callable[[Path], Path]]:
    def register(change: Callable[[Path], Path]) -> Callable[[Path], Path]:
        DAMAGE[name] = change
        return change

    return register


@_damages("a shard one byte short")
def _truncate(step: Path) -> Path:
    file = step / "rank-00002.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    return file


@_damages("a shard that is missing")
def _remove(step: Path) -> Path:
    file = step / "rank-00001.safetensors"
    file.unlink()
    return file


@_damages("a shard of another rank")
def _swap(step: Path) -> Path:
    file = step / "rank-00003.safetensors"
    file.write_bytes((step / "rank-00000.safetensors").read_bytes())
    return file


@_damages("a shard that is a link")
def _link(step: Path) -> Path:
    file = step / "rank-00000.safetensors"
    file.rename(step.parent / "elsewhere")
    file.symlink_to(step.parent / "elsewhere")
    return file


@_damages("a shard that is a pickle")
def _pickle(step: Path) -> Path:
    file = step / "rank-00000.safetensors"
    file.write_bytes(b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.")
    return file


@_damages("a manifest of zeros")
def _zeros(step: Path) -> Path:
    file = step / "manifest.json"
    file.write_bytes(bytes(file.stat().st_size))
    return file


@_damages("a newest step that is gone")
def _gone(step: Path) -> Path:
    step.rename(step.parent / "gone")
    return step


def damaged_runs(folder: Path, share: float = 1.0) -> Figures:
    """Runs of four ranks that are to go on from a damaged step: they end with 5, the file is named, no step is run."""
    names = list(DAMAGE)

    def trial(index: int) -> Sequence[str]:
        run = folder / str(index)
        assert run_forked(request(run), f"rank=1,step={LAST},at=forward,kind=kill").code == 4
        saved = Checkpoints(run / "checkpoints")
        newest = saved.newest()
        assert newest is not None
        before, file = (run / "metrics.jsonl").read_bytes(), DAMAGE[names[index]](saved.folder(newest))
        ended = run_forked(request(run))
        faults = [] if ended.code == 5 else [f"exit code {ended.code}"]
        faults += [] if str(file) in ended.message and "\n" not in ended.message else [f"it said {ended.message!r}"]
        faults += [] if (run / "metrics.jsonl").read_bytes() == before else ["it trained"]
        return [f"{names[index]}: {each}" for each in faults]

    return campaign(
        "a run that finds a damaged step: exit code 5, the file named, no step", trial, some(len(names), share)
    )
