"""The commands that messages print as examples do what they say, where there is what they name."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from tests.campaigns.commands import SCRIPT, TABLE
from tests.support.checkout import ROOT
from tests.support.command_tree import examples
from tests.support.forked import TINY, forked_command

EXAMPLES = examples()

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]
#: What an example needs that is not installed everywhere, by command.
LIBRARIES = {"eval harness": "lm_eval", "data clean": "rensa"}
#: What makes an example quick: trainings are planned, and not run. Tests of these commands run short ones.
MORE = {"finetune": ("--dry-run",), "sweep": ("--print-commands",)}
#: Examples whose outputs, here as patterns, others read.
FIRST = {"data train-tokenizer": "tokenizer.json", "data prepare": "texts.*"}


def run_in(folder: Path, *words: str) -> None:
    done = forked_command(words, folder, timeout=200)
    assert done.returncode == 0, (words, done.stderr)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and its export, texts, a plugin's file, a table and a script."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "texts").mkdir()
    for number in range(3):
        lines = (f"document {number} tells in line {line} of {line * 7919} foxes" for line in range(200))
        (folder / "texts" / f"{number}.txt").write_text("\n".join(lines))
    (folder / "test.txt").write_text("some words that are tested")
    (folder / "measured.csv").write_text(TABLE)
    (folder / "pretrain.sh").write_text(SCRIPT)
    shutil.copyfile(ROOT / "tests/examples/plugins/scaler.py", folder / "mine.py")
    left_out = ("data.vocab_size", "train.sequence_length", "model.num_heads")
    sets = [f"{key}={value}" for key, value in TINY.items() if key not in left_out]
    sets += ["data.use=text", "data.paths=texts/*.txt", "train.sequence_length=64"]
    run_in(folder, "preset:tiny", "--quiet", *(word for each in sets for word in ("--set", each)))
    run_in(folder, "export", "runs/latest", "gpt2", "--to", "huggingface")
    for command in FIRST:
        run_in(folder, *command.split(), *shlex.split(EXAMPLES[command]))
    return folder


@pytest.mark.parametrize("command", EXAMPLES)
def test_an_example_works_as_it_is_printed(command: str, place: Path, tmp_path: Path) -> None:
    if command in LIBRARIES:
        pytest.importorskip(LIBRARIES[command])
    folder = Path(shutil.copytree(place, tmp_path / "copied", symlinks=True))
    for made in folder.glob(FIRST.get(command, "nothing")):
        made.unlink()
    run_in(folder, *command.split(), *shlex.split(EXAMPLES[command]), *MORE.get(command, ()))


@pytest.mark.nightly
def test_the_example_of_a_sweep_trains_all_its_runs(place: Path) -> None:
    """Ten, of ten seconds each."""
    run_in(place, "sweep", *shlex.split(EXAMPLES["sweep"]))
