"""The files of a dataset appear together, and none of them in the place of a file that is not theirs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_run.errors import InputError
from megatron_run_cli.main import main
from megatron_run_data_indexed.preparation.about import made_with, read_about, writing
from megatron_run_data_indexed.preparation.clean import Cleaning, clean
from megatron_run_data_indexed.preparation.import_export import import_
from megatron_run_data_indexed.preparation.inputs import find_inputs
from megatron_run_data_indexed.preparation.prepare import Preparation, prepare
from megatron_run_engine.data.documents import find_documents
from megatron_run_engine.data.indexed_files import IndexedReader
from megatron_run_engine.data.tokenizer_training import train_tokenizer

ROWS = ("one text", "and another")


def make(prefix: Path, source: Path, *, overwrite: bool = False) -> None:
    found, _ = find_inputs([str(source)])
    prepare(
        Preparation(tuple(found), prefix, "bytes"), overwrite=overwrite, tell=lambda _: None, progress=lambda _: None
    )


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """JSON lines with the name that the record of a dataset ``mine`` has."""
    file = tmp_path / "mine.json"
    file.write_text("".join(json.dumps({"text": text, "tokens": [1, 2]}) + "\n" for text in ROWS))
    return file


@pytest.mark.parametrize("overwrite", [False, True])
def test_no_dataset_is_written_over_its_input(overwrite: bool, texts: Path, tmp_path: Path) -> None:
    before = texts.read_bytes()
    with pytest.raises(InputError, match=r"mine\.json is an input too; name another --out"):
        make(tmp_path / "mine", texts, overwrite=overwrite)
    (tmp_path / "link.json").symlink_to("mine.json")
    with pytest.raises(InputError, match=r"link\.json is an input too"):
        make(tmp_path / "link", texts, overwrite=overwrite)
    assert texts.read_bytes() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link.json", "mine.json"]


@pytest.mark.parametrize("ending", [".bin", ".json", ".idx"])
def test_no_file_of_another_program_is_replaced_unasked(ending: str, texts: Path, tmp_path: Path) -> None:
    other = tmp_path / f"out{ending}"
    other.write_text("another program's")
    writers: list[Callable[..., object]] = [
        lambda **asked: make(tmp_path / "out", texts, **asked),
        lambda **asked: import_(texts, tmp_path / "out", "tokens", **asked),
    ]
    for write in writers:
        with pytest.raises(InputError, match="exists"):
            write()
        assert other.read_text() == "another program's"
    for write in writers:
        write(overwrite=True)
        assert len(IndexedReader(tmp_path / "out")) == len(ROWS)


def test_no_tokenizer_is_written_over_its_texts(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = texts.read_bytes()
    words = ["data", "train-tokenizer", str(texts), "--vocab-size", "300", "--out", str(texts), "--overwrite"]
    assert main(words) == 2
    assert "mine.json is an input too; name another --out" in capsys.readouterr().err
    assert texts.read_bytes() == before


def test_nothing_is_written_over_the_tokenizer_that_makes_it(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "words").mkdir()
    file = tmp_path / "words" / "tokenizer.json"
    train_tokenizer(ROWS, "bpe", 300, file)
    before = file.read_bytes()
    for tokenizer in (file, file.parent):
        for command, out in (("prepare", file.with_suffix("")), ("clean", file.with_name("tokenizer.jsonl"))):
            if command == "clean":
                out.unlink(missing_ok=True)
                out.symlink_to(file)
            words = ["data", command, str(texts), "--out", str(out), "--tokenizer", str(tokenizer), "--overwrite"]
            assert main(words) == 2
            assert "is an input too; name another --out" in capsys.readouterr().err
            assert file.read_bytes() == before


def test_what_is_said_of_a_dataset_is_no_text_of_its_folder(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    source = texts.rename(tmp_path / "texts" / "a.jsonl")
    make(tmp_path / "texts" / "mine", source)
    (source.parent / "data.json").write_text('{"text": "another"}')
    read = [file.name for file in (source.parent / "data.json", source)]
    for name in (str(source.parent), str(source.parent / "*.json*")):
        assert sorted(each.path.name for each in find_inputs([name])[0]) == sorted(read)
        assert sorted(each.path.name for each in find_documents([name])) == sorted(read)


def test_ids_that_replace_a_prepared_dataset_are_not_said_to_be_its_tokenizer_s(texts: Path, tmp_path: Path) -> None:
    make(tmp_path / "out", texts)
    assert made_with(tmp_path / "out") is not None
    import_(texts, tmp_path / "out", "tokens", overwrite=True)
    assert made_with(tmp_path / "out") is None
    assert read_about(tmp_path / "out") == {"documents": 2, "tokens": 4, "inputs": [str(texts)]}


def killed_at_name(number: int, write: Callable[[], object]) -> None:
    """Do ``write`` in a process that is killed before it gives its file ``number``, from 1, its name."""
    process = os.fork()
    if not process:
        rename, given, own = Path.replace, [], os.getpid()

        def counting(path: Path, target: Path) -> Path:
            given.append(target)
            if len(given) == number and os.getpid() == own:  # and not one of its workers
                os.kill(own, signal.SIGKILL)
            return rename(path, target)

        setattr(Path, "replace", counting)  # noqa: B010  # mypy lets no method be assigned
        try:
            write()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL


def test_a_command_that_was_killed_between_two_names_is_typed_again(texts: Path, tmp_path: Path) -> None:
    """The names that it gave are its own; without a temporary file of its last one they are another program's."""
    found = tuple(find_inputs([str(texts)])[0])
    job = Cleaning(found, tmp_path / "kept.jsonl", "bytes")
    writers: dict[str, Callable[[], object]] = {
        "out.idx": lambda: import_(texts, tmp_path / "out", "tokens"),
        "kept.jsonl": lambda: clean(job, progress=lambda _: None),
    }
    for last, write in writers.items():
        killed_at_name(2, write)
        assert len(list(tmp_path.glob(f"{last[:3]}*"))) == 1
        write()
        assert (tmp_path / last).is_file()
        assert not list(tmp_path.glob(".*.tmp"))
        with pytest.raises(InputError, match="exists"):
            write()


def test_a_file_that_its_user_wrote_after_a_kill_is_not_taken_for_the_command_s(texts: Path, tmp_path: Path) -> None:
    job = Cleaning(tuple(find_inputs([str(texts)])[0]), tmp_path / "kept.jsonl", "bytes")
    killed_at_name(1, lambda: clean(job, progress=lambda _: None))
    job.removed.write_text("the user's")
    with pytest.raises(InputError, match=r"kept\.removed\.jsonl exists"):
        clean(job, progress=lambda _: None)
    assert job.removed.read_text() == "the user's"


def test_a_preparation_goes_on_over_its_own_dataset_and_over_no_other(texts: Path, tmp_path: Path) -> None:
    """Its first name is the plan's, and the dataset's three follow."""
    source, folder = texts.rename(tmp_path / "in.jsonl"), tmp_path / "out.preparing"
    killed_at_name(2, lambda: make(tmp_path / "out", source))
    plan = (folder / "plan.json").read_bytes()
    import_(source, tmp_path / "other", "tokens")
    for ending in (".bin", ".idx", ".json"):
        (tmp_path / f"other{ending}").rename(tmp_path / f"out{ending}")
    with pytest.raises(InputError, match=r"the dataset .*out exists; name another --out, or add --overwrite"):
        make(tmp_path / "out", source)
    make(tmp_path / "out", source, overwrite=True)
    folder.mkdir()  # as if it had been killed once all had its name
    (folder / "plan.json").write_bytes(plan)
    make(tmp_path / "out", source)
    assert len(IndexedReader(tmp_path / "out")) == len(ROWS)
    assert not folder.exists()


def test_a_preparation_that_may_replace_may_still_once_it_was_killed(texts: Path, tmp_path: Path) -> None:
    source = texts.rename(tmp_path / "in.jsonl")
    import_(source, tmp_path / "out", "tokens")
    killed_at_name(2, lambda: make(tmp_path / "out", source, overwrite=True))
    make(tmp_path / "out", source)
    assert made_with(tmp_path / "out") is not None


def test_what_is_said_of_a_dataset_comes_with_it_or_not_at_all(tmp_path: Path) -> None:
    def fails() -> dict[str, int]:
        raise RuntimeError

    with pytest.raises(RuntimeError), writing(tmp_path / "out", np.uint16, fails) as writer:
        writer.add([1, 2])
    assert not list(tmp_path.iterdir())
