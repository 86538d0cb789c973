"""``data prepare``: the same documents from every format, the same bytes from any workers and after any kill."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_run.errors import DataError, InputError, RunError
from megatron_run_data_indexed.preparation import inputs
from megatron_run_data_indexed.preparation import prepare as preparation
from megatron_run_data_indexed.preparation.inputs import find_inputs
from megatron_run_data_indexed.preparation.parts import write_part
from megatron_run_data_indexed.preparation.prepare import Preparation, Totals, estimate, prepare
from megatron_run_data_indexed.preparation.records import Policy, Reading
from megatron_run_engine.data.indexed_files import IndexedReader

TEXTS = [f"document {number} — says {'so ' * (number % 17)}{number**7}" for number in range(130)]
BLOCK = 700  # of these documents there are some more than ten blocks


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "SMALLEST", BLOCK)
    monkeypatch.setattr(preparation, "LARGEST", BLOCK)
    monkeypatch.setattr(inputs, "_CHUNK", 256)


def lines(path: Path, texts: list[str] = TEXTS) -> Path:
    rows = "".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts))
    path.write_text(rows)
    return path


def job(folder: Path, *names: Path | str, workers: int = 1, end: str | None = None, **reading: Any) -> Preparation:
    found, _ = find_inputs([str(name) for name in names])
    return Preparation(tuple(found), folder / "out", "bytes", Reading(**reading), end, workers)


def run(asked: Preparation, told: list[str] | None = None, **options: Any) -> Totals:
    tell: Callable[[str], None] = (lambda _: None) if told is None else told.append
    return prepare(asked, tell=tell, progress=lambda _: None, **options)


def texts_of(prefix: Path) -> list[str]:
    """The documents, each of which ends with the token 256."""
    reader = IndexedReader(prefix)
    assert len(reader.documents) == len(reader) + 1
    found = [reader[number].tolist() for number in range(len(reader))]
    assert all(tokens[-1] == 256 for tokens in found)
    return [bytes(tokens[:-1]).decode() for tokens in found]


def written(prefix: Path) -> tuple[bytes, ...]:
    return tuple(Path(f"{prefix}{ending}").read_bytes() for ending in (".bin", ".idx", ".json"))


def packed(path: Path, content: bytes) -> Path:
    """``path`` plain or compressed, as its name ends."""
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content))
    elif path.suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        half = len(content) // 2  # two frames, as `cat a.zst b.zst` makes
        path.write_bytes(
            b"".join(zstandard.ZstdCompressor().compress(part) for part in (content[:half], content[half:]))
        )
    else:
        path.write_bytes(content)
    return path


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_json_lines_become_documents_in_their_order(tmp_path: Path, ending: str) -> None:
    content = lines(tmp_path / "plain.jsonl").read_bytes()
    totals = run(job(tmp_path, packed(tmp_path / f"a.jsonl{ending}", content)))
    assert texts_of(tmp_path / "out") == TEXTS
    assert (totals.documents, totals.empty, totals.malformed) == (len(TEXTS), 0, 0)
    assert totals.tokens == len(IndexedReader(tmp_path / "out").tokens)
    assert not (tmp_path / "out.preparing").exists()


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_text_is_one_document_or_cut_at_its_separator(tmp_path: Path, ending: str) -> None:
    path = packed(tmp_path / f"a.txt{ending}", "\n--\n".join(TEXTS).encode())
    run(job(tmp_path, path, separator=b"\n--\n"))
    assert texts_of(tmp_path / "out") == TEXTS
    run(job(tmp_path, path), overwrite=True)
    assert texts_of(tmp_path / "out") == ["\n--\n".join(TEXTS)]


def test_parquet_rows_become_documents(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"id": range(len(TEXTS)), "body": TEXTS})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=30)
    told: list[str] = []
    run(job(tmp_path, tmp_path / "a.parquet", key="body"))
    assert texts_of(tmp_path / "out") == TEXTS
    parquet.write_table(arrow.table({"body": ["one", None, "two"]}), tmp_path / "b.parquet")
    run(job(tmp_path, tmp_path / "b.parquet", key="body", malformed="skip"), told, overwrite=True)
    assert texts_of(tmp_path / "out") == ["one", "two"]
    assert "b.parquet, row 2 is left out: column 'body' holds a null" in told[0]
    with pytest.raises(DataError, match=r"b.parquet has no column 'bdy'; did you mean 'body'"):
        run(job(tmp_path, tmp_path / "b.parquet", key="bdy"), overwrite=True)


def test_a_folder_is_walked_in_an_order_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "b").mkdir(parents=True)
    lines(folder / "b" / "2.jsonl", ["third"])
    lines(folder / "a.jsonl", ["first"])
    (folder / "b" / "1.md").write_text("second")
    (folder / "left.png").write_bytes(b"\0")
    (folder / ".hidden.jsonl").write_text("{")
    found, left_out = find_inputs([str(folder)])
    assert left_out == 1
    run(Preparation(tuple(found), tmp_path / "out", "bytes"))
    assert texts_of(tmp_path / "out") == ["first", "second", "third"]


@pytest.mark.multiproc
def test_the_bytes_do_not_depend_on_the_workers(tmp_path: Path) -> None:
    made, source = [], lines(tmp_path / "a.jsonl")
    for workers in (1, 3):
        run(job(tmp_path, source, workers=workers), overwrite=True)
        made.append(written(tmp_path / "out"))
    assert made[0] == made[1]


def test_the_end_of_a_document_can_be_another_token_or_none(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", ["ab"])
    run(job(tmp_path, path, end="x"))
    assert IndexedReader(tmp_path / "out")[0].tolist() == [97, 98, 120]
    run(job(tmp_path, path, end="none"), overwrite=True)
    assert IndexedReader(tmp_path / "out")[0].tolist() == [97, 98]
    with pytest.raises(InputError, match="'xy' is 2 tokens"):
        run(job(tmp_path, path, end="xy"), overwrite=True)


BAD = [
    (b'{"text": "half', "no JSON"),
    (b'{"txt": 1}', "no key 'text'; did you mean 'txt'"),
    (b'{"text": null}', "key 'text' holds a JSON null"),
    (b"[1, 2]", "a JSON array, not an object"),
    (b'{"text": "\xff"}', "not UTF-8 at its byte 10"),
    (rb'{"text": "\ud800"}', "surrogate"),
    (b"[" * 100_000, "nested too deep"),
]


@pytest.mark.parametrize("policy", ["refuse", "skip", "keep"])
@pytest.mark.parametrize(("line", "why"), BAD, ids=[why for _, why in BAD])
def test_a_malformed_record_is_one_line_with_file_line_and_reason(
    tmp_path: Path, line: bytes, why: str, policy: Policy
) -> None:
    good = lines(tmp_path / "good.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_bytes(b"".join([*good[:80], line + b"\n", b"\n", *good[80:]]))
    told: list[str] = []
    asked = job(tmp_path, tmp_path / "a.jsonl", malformed=policy)
    if policy == "refuse":
        with pytest.raises(DataError) as caught:
            run(asked)
        told.append(str(caught.value))
        run(job(tmp_path, tmp_path / "a.jsonl", malformed="keep"))  # goes on from there
    else:
        assert run(asked, told).malformed == 1
    assert len(told) == 1
    assert "a.jsonl, line 81 is" in told[0]
    assert why in told[0]
    found = texts_of(tmp_path / "out")
    assert [text for text in found if text.startswith("document")] == TEXTS
    assert len(found) == len(TEXTS) + (policy != "skip")


def test_empty_records_are_counted_and_left_out(tmp_path: Path) -> None:
    totals = run(job(tmp_path, lines(tmp_path / "a.jsonl", ["one", "", "  \n", "two"])))
    assert texts_of(tmp_path / "out") == ["one", "two"]
    assert (totals.documents, totals.empty) == (2, 2)


def cut_short(path: Path) -> None:
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 10_000)[:-20])


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("a.jsonl", lambda path: path.touch(), "a.jsonl is empty"),
        ("a.jsonl", lambda path: None, "a.jsonl does not exist"),
        ("texts", lambda path: (path.parent / "text").mkdir(), "texts does not exist; did you mean 'text'"),
        ("a.txt", lambda path: path.write_bytes(b"Salted__\x01"), "it is encrypted; decrypt it"),
        ("a.txt", lambda path: path.write_bytes("two bytes each".encode("utf-16")), "it is UTF-16; save it as UTF-8"),
        ("a.jsonl", lambda path: path.write_bytes(gzip.compress(b"{}")), "compressed by gzip; name it .gz"),
        ("a.jsonl.gz", lambda path: path.write_bytes(b"{}\n"), "is no .gz file"),
        ("a.jsonl.gz", cut_short, "a.jsonl.gz cannot be unpacked"),
        ("a.parquet", lambda path: path.write_bytes(b"PARE....PARE"), "encrypted"),
        ("a.parquet", lambda path: path.write_bytes(b"PAR1....PAR1"), "a.parquet is damaged"),
        ("a.parquet", lambda path: path.write_bytes(b"no"), "is no Parquet file"),
        ("a.csv", lambda path: path.write_text("a,b"), "a.csv does not say what it holds.*add --format"),
        ("a.jsonl", lambda path: path.write_text("\n\n"), "there is no document: 2 were empty"),
        ("*.jsonl", lambda path: None, "matches no file"),
        (".", lambda path: None, "holds no file to prepare"),
    ],
)
def test_an_input_that_is_none_is_one_line(
    tmp_path: Path, name: str, make: Callable[[Path], object], message: str
) -> None:
    make(tmp_path / name)
    with pytest.raises(RunError, match=message) as caught:
        run(job(tmp_path, tmp_path / name))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out.idx").exists()


def test_a_dataset_is_not_replaced_unless_asked(tmp_path: Path) -> None:
    run(job(tmp_path, lines(tmp_path / "a.jsonl")))
    with pytest.raises(InputError, match="exists"):
        run(job(tmp_path, lines(tmp_path / "a.jsonl", ["new"])))
    run(job(tmp_path, lines(tmp_path / "a.jsonl", ["new"])), overwrite=True)
    assert texts_of(tmp_path / "out") == ["new"]


def test_a_dry_run_writes_nothing_and_comes_near(tmp_path: Path) -> None:
    asked = job(tmp_path, lines(tmp_path / "a.jsonl"))
    guess = estimate(asked)
    assert not (tmp_path / "out.preparing").exists()
    totals = run(asked)
    assert guess.documents == pytest.approx(totals.documents, rel=0.1)
    assert guess.tokens == pytest.approx(totals.tokens, rel=0.1)


def child(work: Callable[[], object]) -> int:
    """Run ``work`` in a process of its own; what it ended with, negative for a signal."""
    process = os.fork()
    if not process:
        try:
            work()
        except RunError:
            os._exit(5)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def killed_at(number: int, asked: Preparation) -> int:
    """Run until the process that prepares, or one of its workers, comes to change the disk the ``number``-th time."""

    def work() -> None:
        left = number

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            def called(*words: Any, **named: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*words, **named)

            return called

        for owner, name in (
            *((Path, name) for name in ("replace", "open", "unlink", "mkdir", "write_text")),
            *((os, name) for name in ("fsync", "rmdir", "unlink")),
        ):
            setattr(owner, name, counted(getattr(owner, name)))
        run(asked)

    return child(work)


def endings(folder: Path, numbers: range) -> int:
    """Kill at each of ``numbers`` and go on; how many of these runs were killed before their end."""
    asked = job(folder, lines(folder / "a.jsonl", TEXTS[:60]))
    run(asked)
    whole, killed = written(asked.prefix), 0
    for number in numbers:
        for left in [*folder.glob("out*")]:
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        killed += killed_at(number, asked) != 0
        try:
            run(asked)
        except InputError:  # it was whole already
            assert number > 5
        assert written(asked.prefix) == whole, number
        assert sorted(path.name for path in folder.iterdir()) == ["a.jsonl", "out.bin", "out.idx", "out.json"], number
    return killed


@pytest.mark.multiproc
def test_a_killed_preparation_ends_with_the_same_bytes(tmp_path: Path) -> None:
    assert endings(tmp_path, range(1, 60, 7)) > 4


@pytest.mark.multiproc
@pytest.mark.nightly
def test_a_preparation_may_be_killed_at_every_change_of_the_disk(tmp_path: Path) -> None:
    assert endings(tmp_path, range(80)) > 30


def test_finished_parts_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = job(tmp_path, lines(tmp_path / "a.jsonl"))
    assert killed_in_writer(asked) == -signal.SIGKILL
    parts = sorted(asked.folder.glob("*.part"))
    damaged = bytearray(parts[3].read_bytes())
    damaged[10] ^= 1
    parts[3].write_bytes(damaged)
    times = {path: path.stat().st_mtime_ns for path in parts}
    log = tmp_path / "made"
    real = preparation.tokenised

    def counted(block: Any, *words: Any) -> Any:
        with log.open("a") as file:
            file.write(f"{block.number} ")
        return real(block, *words)

    monkeypatch.setattr(preparation, "tokenised", counted)
    assert len(times) > 10
    run(asked)
    assert log.read_text() == "3 "
    assert texts_of(tmp_path / "out") == TEXTS


def killed_in_writer(asked: Preparation) -> int:
    def work() -> None:
        vars(preparation)["writing"] = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        run(asked)

    return child(work)


@pytest.mark.parametrize("change", ["inputs", "key", "tokenizer"])
def test_an_unfinished_preparation_of_something_else_is_refused(tmp_path: Path, change: str) -> None:
    path = lines(tmp_path / "a.jsonl")
    assert killed_in_writer(job(tmp_path, path)) == -signal.SIGKILL
    other = job(tmp_path, path, key="id" if change == "key" else "text", malformed="keep")
    if change == "inputs":
        other = job(tmp_path, lines(path, [*TEXTS, "more"]))
    if change == "tokenizer":
        vocabulary = tmp_path / "vocab.txt"
        vocabulary.write_text("[UNK]\n")
        other = Preparation(other.inputs, other.prefix, str(vocabulary))
    with pytest.raises(InputError, match=f"unfinished preparation of something else: .*{change}"):
        run(other)
    run(other, overwrite=True)
    assert len(IndexedReader(tmp_path / "out")) == len(TEXTS) + (change == "inputs")


@pytest.mark.multiproc
def test_a_killed_worker_is_one_line_and_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = preparation.tokenised

    def out_of_memory(block: Any, *words: Any) -> Any:
        if block.number == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(block, *words)

    asked = job(tmp_path, lines(tmp_path / "a.jsonl"), workers=2)
    with monkeypatch.context() as patched:
        patched.setattr(preparation, "tokenised", out_of_memory)
        with pytest.raises(DataError, match=r"ended with code -9: .* memory"):
            run(asked)
    run(asked)
    assert texts_of(tmp_path / "out") == TEXTS


def test_a_full_disk_is_one_line_and_goes_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = write_part

    def full(path: Path, *words: Any) -> None:
        if path.stem.endswith("5"):
            raise OSError(28, "No space left on device")
        real(path, *words)

    asked = job(tmp_path, lines(tmp_path / "a.jsonl"))
    with monkeypatch.context() as patched:
        patched.setattr(preparation, "write_part", full)
        with pytest.raises(DataError, match="cannot be written: No space left on device; free some space"):
            run(asked)
    run(asked)
    assert texts_of(tmp_path / "out") == TEXTS


def test_two_preparations_of_one_name_do_not_meet(tmp_path: Path) -> None:
    asked = job(tmp_path, lines(tmp_path / "a.jsonl"))

    ended: list[int] = []

    def again(_: Totals) -> None:
        if not ended:
            ended.append(child(lambda: run(asked)))

    prepare(asked, tell=print, progress=again)
    assert ended == [5]
    assert texts_of(tmp_path / "out") == TEXTS
