"""What a run keeps beside its checkpoints: found by its hash wherever the folder goes, never replaced in silence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

import pytest
import tokenizers

from megatron_run import load, load_config
from megatron_run.config.request import Request
from megatron_run.errors import CheckpointError, DataError, InputError, RunError
from megatron_run.planning import ResolvedRun, resolve
from megatron_run_engine import train
from megatron_run_engine.checkpoint.kept_files import (
    exported_tokenizer,
    is_kept,
    keep_tokenizer,
    kept_tokenizer,
    same_tokenizer,
    tokenizer_files,
    tokenizer_of,
)
from megatron_run_engine.checkpoint.manifest import About
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from megatron_run_engine.data.tokenizer_folder.record import BESIDE, MODEL_CONFIG, TEMPLATES, TOKENIZER_CONFIG
from megatron_run_engine.formats.convert import read_step
from megatron_run_engine.run_folder.opening import check_run_folder
from megatron_run_inference.source import find_source

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "[UNK]")
#: Where the tokenizer lies that runs are given, in a folder of its own.
GIVEN = "t/tokenizer.json"
TEXT = "the quick brown fox jumps over a lazy dog\n" * 100
SMALL = {
    "model.num_layers": 1,
    "model.hidden_size": 16,
    "model.num_heads": 2,
    "run.threads": 1,
    "observer.use": [],
    "train.sequence_length": 16,
    "train.steps": 1,
    "train.lr_warmup": 0,
    "train.global_batch_size": 2,
    "eval.interval": 0,
    "data.use": "text",
    "data.split": "90,10,0",
}


def write_words(path: Path, words: tuple[str, ...] = WORDS) -> Path:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: id_ for id_, word in enumerate(words)}, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["dog"])
    path.parent.mkdir(exist_ok=True)
    made.save(str(path))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run whose configuration names its tokenizer by a relative path."""
    home = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        write_words(Path(GIVEN))
        said = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "dog"}
        Path(GIVEN).with_name("tokenizer_config.json").write_text(json.dumps(said))
        Path("text.txt").write_text(TEXT)
        train(load_config("preset:tiny", sets={**SMALL, **paths(GIVEN), "run.folder": "r"}))
    return home


def paths(tokenizer: str) -> dict[str, object]:
    return {"data.paths": "text.txt", "data.tokenizer": tokenizer}


def extended(more: Mapping[str, object]) -> ResolvedRun:
    """The run, one step longer."""
    values = {**SMALL, "run.folder": "r", "train.steps": 2, **more}
    return resolve(Request(("preset:tiny",), values=values, extend=True))


@pytest.fixture
def carried(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run alone, in another folder, which is the current one."""
    shutil.copytree(trained / "r", tmp_path / "r")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "r"


def about_of(run: Path) -> About:
    return Checkpoints(run / "checkpoints").manifest(1).about


def test_a_carried_run_reads_text_as_it_did_whatever_lies_at_the_path_of_its_configuration(carried: Path) -> None:
    text = "a lazy dog jumps"
    assert load("r").encode(text) == [6, 7, 8, 4]
    write_words(Path(GIVEN), tuple(reversed(WORDS)))
    assert load("r").encode(text) == [6, 7, 8, 4]
    assert load("r/checkpoints/step1").encode(text) == [6, 7, 8, 4]
    assert load("r", sets={"data.tokenizer": GIVEN}).encode(text) == [3, 2, 1, 5]  # asked for


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizer_that_is_lost_or_another_is_refused_by_its_path(carried: Path, name: str) -> None:
    (carried / name).unlink()
    with pytest.raises(DataError, match=f"of step 1 is not beside it: r/{name} is missing: .*; put it back, or name a"):
        load("r")
    write_words(carried / name, tuple(reversed(WORDS)))
    with pytest.raises(DataError, match=f"r/{name} is not the file that it was"):
        load("r")
    assert load("r", sets={"data.tokenizer": str(carried / name)}).encode("dog") == [1]


def test_the_configured_file_serves_where_it_is_the_same(trained: Path, tmp_path: Path) -> None:
    home, about = tmp_path / "r", about_of(trained / "r")
    home.mkdir()
    same, other = trained / GIVEN, write_words(tmp_path / "other.json", tuple(reversed(WORDS)))
    assert tokenizer_of(home, about, str(same)) == str(same)
    for name in (str(other), str(tmp_path / "nothing.json"), "bytes"):
        with pytest.raises(DataError, match="is missing"):
            tokenizer_of(home, about, name)


def test_a_carried_run_goes_on_with_the_tokenizer_that_it_keeps(carried: Path, trained: Path) -> None:
    Path("text.txt").write_text(TEXT)
    run = extended(paths("r/tokenizer.json"))
    check_run_folder(run)
    train(run, extend=True)
    assert Checkpoints(carried / "checkpoints").steps() == [1, 2]
    other = write_words(Path("other.json"), tuple(reversed(WORDS)))
    with pytest.raises(InputError, match=r"data\.tokenizer=.*, now other\.json"):
        check_run_folder(extended(paths(str(other))))


def test_a_run_that_is_refused_keeps_its_tokenizer(carried: Path) -> None:
    Path("text.txt").write_text(TEXT)
    before = (carried / "tokenizer.json").read_bytes()
    write_words(Path(GIVEN), tuple(reversed(WORDS)))
    with pytest.raises(RunError, match="the data has another tokenizer"):
        train(extended(paths(GIVEN)), extend=True)
    assert (carried / "tokenizer.json").read_bytes() == before


def test_changed_contents_are_told_and_recorded_where_no_key_has_changed(
    carried: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And the step that was trained with the old tokenizer still has it."""
    shutil.copytree(carried, "before")
    text = "a lazy dog jumps"
    write_words(Path(GIVEN), tuple(reversed(WORDS)))
    Path("text.txt").write_text(TEXT * 2)
    train(extended(paths(GIVEN)), extend=True, allow_change=["data", "data.tokenizer"])
    hashes = [sha256((run / "tokenizer.json").read_bytes()).hexdigest()[:12] for run in (Path("before"), carried)]
    changes = json.loads((carried / "run.json").read_text())["attempts"][-1]["changes"]
    assert changes["contents of data.tokenizer"] == hashes
    assert len(set(changes["contents of data"])) == 2
    assert "of the training data text.txt has other contents" in caplog.text
    assert load("r/checkpoints/step1").encode(text) == [6, 7, 8, 4]
    assert load("r/checkpoints/step2").encode(text) == [3, 2, 1, 5]


def test_another_tokenizer_gives_way_and_stays_with_the_steps_that_have_it(trained: Path, tmp_path: Path) -> None:
    home, about = tmp_path / "home", about_of(trained / "r")
    home.mkdir()
    keep_tokenizer(tokenizer_files(trained / GIVEN), home)
    names = ["tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in home.iterdir()) == names
    for _ in range(2):
        keep_tokenizer(tokenizer_files(write_words(tmp_path / "u.json", tuple(reversed(WORDS)))), home)
        assert sorted(path.name for path in home.iterdir()) == ["tokenizer.json", "tokenizers"]
    (older,) = (home / "tokenizers").iterdir()
    assert sorted(path.name for path in older.iterdir()) == names
    assert kept_tokenizer(home, about) == older / "tokenizer.json" == exported_tokenizer(home, about)
    assert tokenizer_of(home, about, "bytes") == str(older / "tokenizer.json")
    older.rename(tmp_path / "elsewhere")
    older.symlink_to(tmp_path / "elsewhere")
    assert kept_tokenizer(home, about) is None


def test_a_sentencepiece_model_is_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    for name, kind in (("one", "bpe"), ("two", "unigram")):
        sentencepiece.SentencePieceTrainer.train(
            input="text.txt", model_prefix=name, hard_vocab_limit=False, vocab_size=31, model_type=kind, minloglevel=2
        )
    train(load_config("preset:tiny", sets={**SMALL, **paths("one.model"), "run.folder": "r"}))
    ids = load("r").encode("quick dog")
    kept = kept_tokenizer(Path("r"), about_of(Path("r")))
    assert kept == Path("r/tokenizer.model")
    Path("two.model").replace("one.model")
    assert load("r").encode("quick dog") == ids
    assert find_source(Path("r")).config["data"]["tokenizer"] == "r/tokenizer.model"


def without(home: Path) -> None:
    (home / "tokenizer_config.json").unlink()


def with_another_end(home: Path) -> None:
    file = home / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token": "dog"}))


def with_a(name: str) -> Callable[[Path], None]:
    def put(home: Path) -> None:
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_text("{}")

    return put


ADDED = [name for name in (*BESIDE, MODEL_CONFIG) if name not in (TOKENIZER_CONFIG, TEMPLATES)]


@pytest.mark.parametrize(
    "change",
    [without, with_another_end, *(with_a(name) for name in (*ADDED, f"{TEMPLATES}/tool_use.jinja"))],
    ids=["lost", "end", *ADDED, TEMPLATES],
)
def test_a_tokenizer_is_opened_only_with_the_files_that_it_was_kept_with(
    carried: Path, change: Callable[[Path], None]
) -> None:
    """By every reader of a run: a prompt, a training that starts from it, an export."""
    about = about_of(carried)
    assert kept_tokenizer(carried, about) == carried / "tokenizer.json"
    change(carried)
    assert kept_tokenizer(carried, about) is None
    with pytest.raises(DataError, match=r"of step 1 is not beside it: r/.* (is missing|is not the file|was not there)"):
        load("r")


@pytest.mark.parametrize("name", [*BESIDE, MODEL_CONFIG])
def test_a_link_beside_a_kept_tokenizer_leads_nowhere(carried: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").write_text("{}")
    (carried / name).unlink(missing_ok=True)
    (carried / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        (DataError, CheckpointError), match=rf"{name} (is not read: it is a symbolic link|was not there)"
    ):
        load("r")


def test_an_export_refuses_a_changed_tokenizer_and_does_without_a_lost_one(carried: Path) -> None:
    with_another_end(carried)
    with pytest.raises(CheckpointError, match=r"is not exported: .*tokenizer_config\.json is not the file that it was"):
        read_step(Checkpoints(carried / "checkpoints"), 1)
    without(carried)
    assert read_step(Checkpoints(carried / "checkpoints"), 1).tokenizer is None


def test_a_tokenizer_is_the_same_where_all_of_its_files_are(trained: Path, tmp_path: Path) -> None:
    record = about_of(trained / "r").tokenizer
    assert record is not None
    same = shutil.copytree((trained / GIVEN).parent, tmp_path / "t")
    assert same_tokenizer(str(same), record)
    assert is_kept(trained / "r", str(same))
    (same / "chat_template.jinja").write_text("{{ messages }}")
    assert not same_tokenizer(str(same), record)
    assert not is_kept(trained / "r", str(same))
    assert not same_tokenizer("bytes", record)


def test_a_step_names_the_tokenizer_as_its_user_does(trained: Path) -> None:
    """And not the copy in the cache, which another machine does not have."""
    record = about_of(trained / "r").tokenizer
    assert record is not None
    assert record.name == GIVEN
