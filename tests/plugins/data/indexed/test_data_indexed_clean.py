"""The rules of a clean corpus, against planted documents and the theory of locality-sensitive hashing."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from megatron_run.errors import DataError, InputError
from megatron_run_cli.main import program
from megatron_run_data_indexed.preparation import document_rules as rules
from megatron_run_data_indexed.preparation.document_rules import Examiner, Features, Rules, Verdict, judge, ngrams_of
from megatron_run_data_indexed.preparation.near_duplicates import (
    BANDS,
    HASHES,
    SHINGLE,
    Duplicates,
    jaccard,
    shingles,
)
from tests.plugins.data.indexed.counting import spaces

rensa = pytest.importorskip("rensa")


class Named(NamedTuple):
    name: str
    text: str


def words(count: int, seed: object) -> list[str]:
    """Words that no other seed has."""
    mark = sha256(repr(seed).encode()).hexdigest()[:8]
    return [f"{mark}x{number}" for number in random.Random(mark).sample(range(10**6), count)]


def planted(similarity: float, seed: object, size: int = 200) -> tuple[str, str]:
    """Two documents of ``size`` shingles, whose last words differ so that their Jaccard index is ``similarity``."""
    differ = round(size * (1 - similarity) / (1 + similarity))
    first = words(size + SHINGLE - 1, seed)
    return " ".join(first), " ".join([*first[: len(first) - differ], *words(differ, f"{seed}other")])


def verdicts(texts: Sequence[str], rules: Rules, tests: Sequence[str] = (), workers: int = 1) -> list[Verdict]:
    examiner = partial(Examiner, rules, spaces, ngrams_of(tests, rules.ngram))
    named = (Named(str(number), text) for number, text in enumerate(texts))
    return [verdict for _document, verdict in judge(named, rules, examiner, workers)]


def plain_jaccard(one: str, other: str) -> float:
    sets = [
        {tuple(text.split()[i : i + SHINGLE]) for i in range(len(text.split()) - SHINGLE + 1)} for text in (one, other)
    ]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


@pytest.mark.parametrize("similarity", [0.3, 0.5, 0.7, 0.95])
def test_jaccard_is_the_plain_one(similarity: float) -> None:
    pair = planted(similarity, similarity)
    assert jaccard(*shingles(pair)) == pytest.approx(plain_jaccard(*pair))


def test_documents_leave_by_their_length() -> None:
    texts = [" ".join(words(count, count)) for count in (4, 5, 9, 10)]
    assert [verdict.rule for verdict in verdicts(texts, Rules(min_tokens=5, max_tokens=9))] == ["short", "", "", "long"]


def test_of_near_duplicates_the_first_stays() -> None:
    one, other = planted(0.75, "near")
    far = planted(0.6, "far")
    found = verdicts([one, *far, other, one], Rules(min_tokens=0))
    assert [verdict.rule for verdict in found] == ["", "", "", "duplicate", "duplicate"]
    assert found[3].why == f"{plain_jaccard(one, other):.2f} of 0"
    assert found[4].why == "1.00 of 0"


def test_documents_of_a_few_words_are_duplicates_only_of_themselves() -> None:
    found = verdicts(["two words", "two words", "two others", "", ""], Rules(min_tokens=0))
    assert [verdict.rule for verdict in found] == ["", "duplicate", "", "", ""]


def test_a_duplicate_of_a_removed_document_stays() -> None:
    one, between, last = words(204, "chain"), words(60, "p"), words(60, "q")
    chain = [" ".join(one), " ".join([*one[:-30], *between[:30]]), " ".join([*one[:-60], *last])]
    likeness = [plain_jaccard(chain[a], chain[b]) for a, b in ((0, 1), (0, 2))]
    assert likeness[0] >= 0.7 > likeness[1]
    assert [verdict.rule for verdict in verdicts(chain, Rules(min_tokens=0))] == ["", "duplicate", ""]


@pytest.mark.parametrize("similarity", [0.5, 0.6, 0.7, 0.8, 0.95])
def test_recall_follows_the_theory(similarity: float) -> None:
    """With exact comparison a pair is found if its signatures share a band: 1 - (1 - s^r)^b."""
    pairs = [planted(similarity, (similarity, number)) for number in range(150)]
    with Duplicates(similarity - 0.02) as index:
        index.add([(str(number), hashes) for number, hashes in enumerate(shingles([one for one, _ in pairs]))])
        found = index.add([("", hashes) for hashes in shingles([other for _, other in pairs])])
    expected = 1 - (1 - similarity ** (HASHES // BANDS)) ** BANDS
    spread = (expected * (1 - expected) / len(pairs)) ** 0.5
    assert abs(sum(match is not None for match in found) / len(pairs) - expected) <= 4 * spread + 0.01
    assert all(match is None or match[0] == str(number) for number, match in enumerate(found))


def test_no_pair_below_the_similarity_goes() -> None:
    texts = [text for number in range(100) for text in planted(0.68, number)]
    assert not any(verdict.rule for verdict in verdicts(texts, Rules(min_tokens=0)))


def test_documents_with_words_of_a_test_set_go() -> None:
    test = " ".join(words(30, "test"))
    leak = " ".join([*words(50, "a"), *test.split()[5:13], *words(50, "b")])
    short = " ".join([*words(50, "c"), *test.split()[5:12], *words(50, "d")])
    found = verdicts([leak, short], Rules(min_tokens=0), [test])
    assert [verdict.rule for verdict in found] == ["test set", ""]
    assert found[0].why == " ".join(test.split()[5:13])
    assert not any(verdict.rule for verdict in verdicts([leak, short], Rules(min_tokens=0, shared=2), [test]))


#: Texts of which a test set holds the first sentence, in scripts without spaces and with them.
HELD = {
    "Chinese": ("请问中国的首都是哪里并说明其历史沿革。", "再列出三个著名的景点和一道当地的传统美食谢谢。"),
    "Thai": ("เมืองหลวงของประเทศไทยคือที่ใด", "และมีประวัติศาสตร์อย่างไร โปรดอธิบาย"),
    "Hindi": ("भारत की राजधानी क्या है और उसका इतिहास क्या है", "यह बताइए और तीन प्रसिद्ध स्थानों के नाम लिखिए जी"),
}


@pytest.mark.parametrize("language", HELD)
def test_texts_in_scripts_without_spaces_are_compared_too(language: str) -> None:
    first, second = HELD[language]
    text = first + " " + second
    rule = Rules(min_tokens=1)
    found = verdicts([text, second, f"«{text}»"], rule, tests=[first])
    assert [each.rule for each in found] == ["test set", "", "test set"]
    found = verdicts([text, second, f"«{text}»", text[:-2]], rule)
    assert [each.rule for each in found] == ["", "", "duplicate", "duplicate"]


def test_other_languages_go() -> None:
    pytest.importorskip("py3langid")
    english = "the weather is fine today and the children play in the garden behind the old house"
    german = "das Wetter ist heute schön und die Kinder spielen im Garten hinter dem alten Haus"
    found = verdicts([english, german], Rules(min_tokens=0, languages=frozenset({"de"})))
    assert [(verdict.rule, verdict.why) for verdict in found] == [("language", "en"), ("", "")]
    with pytest.raises(InputError, match="'dee' is no language"):
        verdicts([german], Rules(languages=frozenset({"dee"})))


def test_workers_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_BATCH", 50)  # eight batches, of which four may be under way
    texts = [text for number in range(200) for text in planted(0.5 + number / 500, number)]
    assert verdicts(texts, Rules(), workers=2) == verdicts(texts, Rules())


def corpus(folder: Path, records: Sequence[object]) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def command(*arguments: object) -> str:
    done = CliRunner().invoke(program, ["data", "clean", *map(str, arguments), "--tokenizer", "bytes"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def test_the_command_writes_what_stays_and_why_the_rest_went(tmp_path: Path) -> None:
    one, other = planted(0.8, "file")
    records = [{"text": one, "url": "a"}, {"text": "few"}, {"text": other}, {"text": ""}, {"body": 1}]
    source, out = corpus(tmp_path, records), tmp_path / "out.jsonl.gz"
    report = json.loads(command(source, "--out", out, "--malformed", "skip", "--workers", 1, "--json"))
    assert gzip.decompress(out.read_bytes()).decode() == json.dumps(records[0]) + "\n"
    why = [json.loads(line) for line in (tmp_path / "out.removed.jsonl").read_text().splitlines()]
    assert [(each["name"], each["rule"]) for each in why] == [(f"{source}:2", "short"), (f"{source}:3", "duplicate")]
    assert report["kept"] == {"documents": 1, "tokens": len(one)}
    assert report["removed"]["duplicate"] == {"documents": 1, "tokens": len(other)}
    assert (report["malformed"], report["empty"], report["size"]) == (1, 1, source.stat().st_size)


def test_a_malformed_record_is_named_and_nothing_is_left_behind(tmp_path: Path) -> None:
    source = corpus(tmp_path, [{"text": "x" * 200}, {"body": "x"}])
    with pytest.raises(DataError, match=r"in.jsonl:2 is malformed: no key 'text'"):
        command(source, "--out", tmp_path / "out.jsonl", "--workers", 1)
    assert list(tmp_path.iterdir()) == [source]


def test_what_cannot_begin_is_told_before_there_are_workers(tmp_path: Path) -> None:
    """A worker of a pool that fails at its start breaks the pool, and nobody learns why."""

    def unknown() -> Examiner:
        raise InputError("no such tokenizer")

    with pytest.raises(InputError, match="no such tokenizer"):
        list(judge([Named("a", "text")], Rules(), unknown, 2))


class Killed:
    """An examiner whose worker the system kills, as one without memory."""

    def examine(self, _: Sequence[str]) -> list[Features]:
        os.kill(os.getpid(), signal.SIGKILL)
        return []


@pytest.mark.multiproc
def test_a_killed_worker_is_told_in_one_line() -> None:
    with pytest.raises(DataError, match="a process of this command has ended"):
        list(judge([Named("a", "text")], Rules(), Killed, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["clean", "clean.gz", "clean.txt"])
def test_an_output_is_named_for_what_it_holds(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"does not say its format: JSON lines .*; name it clean.*\.jsonl"):
        command(corpus(tmp_path, [{"text": "x" * 200}]), "--out", tmp_path / name)


def test_no_input_is_written_over(tmp_path: Path) -> None:
    source = corpus(tmp_path, [{"text": "x" * 200}])
    with pytest.raises(InputError, match="is an input too"):
        command(source, "--out", source, "--overwrite")
    command(source, "--out", tmp_path / "out.jsonl", "--workers", 1)
    with pytest.raises(InputError, match="exists"):
        command(source, "--out", tmp_path / "out.jsonl")
