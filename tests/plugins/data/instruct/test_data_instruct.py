"""data=instruct: conversations become the tokens that transformers makes of them, and only responses are learned."""

from __future__ import annotations

import json
import re
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from pydantic import ValidationError
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron_run import load_config
from megatron_run.contracts import DataSource
from megatron_run.errors import DataError
from megatron_run.planning.run_text import hand_over, take_over
from megatron_run_data_instruct import InstructOptions, megatron_run_create_data
from megatron_run_engine.data.chat_template.renderer import Broken, Refused, Renderer
from megatron_run_testing import Check
from megatron_run_testing.data import data_checks
from tests.support.training import train

#: A template of two turns with tags, a filter, a global and a loop control; what a model says is marked or not.
MARKED = """{{ bos_token }}{% for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no role ' ~ message.role) }}{% endif %}
<|{{ message.role }}|>
{% if message.role == 'assistant' -%}
{% generation %}{{ message.content | trim }}{{ eos_token }}{% endgeneration %}
{% else -%}
{{ message.content | tojson }}{{ loop.index }}
{% endif %}
{%- if loop.index > 50 %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
#: Several turns, quotes, an emoji of four bytes, text in several scripts, blank lines.
CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": 'Say "hi" <b>'}, {"role": "assistant", "content": "Hi 🦊 there"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Wie heißt du?"},
        {"role": "assistant", "content": "Ich bin ein Modell.\n\nUnd du?"},
        {"role": "user", "content": "名前は秘密"},
        {"role": "assistant", "content": "わかりました 🙂"},
    ],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as of Hugging Face, with a byte-level tokenizer and no template."""
    folder = tmp_path_factory.mktemp("model")
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
    texts = [message["content"] for chat in CHATS for message in chat] * 3
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    made.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}, "model_max_length": 4096}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {}})
    )
    return folder


def written(path: Path, *records: object) -> Path:
    path.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in records) + "\n", encoding="utf-8")
    return path


def source(path: Path, **options: object) -> DataSource:
    return megatron_run_create_data(
        InstructOptions.model_validate({"paths": str(path), "split": "100,0,0", "packing": "none", **options})
    )


def row_of(path: Path, length: int = 200, **options: object) -> tuple[list[int], list[bool]]:
    """The tokens of the only conversation of ``path``, and which of them are learned."""
    dataset = source(path, **options).dataset("train", length, 0)
    assert len(dataset) == 1
    row: dict[str, Any] = dict(dataset[0])
    size = int(row["documents"][1])
    learned = row["loss_mask"][:size] > 0
    tokens = [*row["tokens"][:size].tolist(), int(row["labels"][size - 1])]
    return tokens, [False, *learned.tolist()]


@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marked", "by what a turn adds"])
@pytest.mark.parametrize("chat", CHATS, ids=["one turn", "several turns"])
def test_tokens_and_responses_are_those_of_transformers(
    folder: Path, tmp_path: Path, template: str, chat: list[dict[str, str]]
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    made = oracle.apply_chat_template(
        chat, chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    (tmp_path / "template.jinja").write_text(template)
    data = written(tmp_path / "chats.jsonl", {"messages": chat})
    tokens, learned = row_of(data, tokenizer=str(folder / "tokenizer.json"), template=str(tmp_path / "template.jinja"))
    assert tokens == made["input_ids"]
    if template is MARKED:
        assert learned == [bool(each) for each in made["assistant_masks"]]
    text = oracle.decode([token for token, counts in zip(tokens, learned, strict=True) if counts])
    end = "</s>" if template is MARKED else "</s>\n"
    assert text == "".join(message["content"] + end for message in chat if message["role"] == "assistant")


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "several in tokenizer_config.json"])
def test_the_template_beside_the_tokenizer_is_found(folder: Path, tmp_path: Path, place: str) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    if place.endswith("jinja"):
        (tmp_path / place).write_text(MARKED)
    else:
        config = tmp_path / "tokenizer_config.json"
        several = [{"name": "tools", "template": "other"}, {"name": "default", "template": MARKED}]
        found = json.loads(config.read_text()) | {"chat_template": several if "several" in place else MARKED}
        config.write_text(json.dumps(found))
    data = written(tmp_path / "chats.jsonl", {"messages": CHATS[0]})
    (tmp_path / "given.jinja").write_text(MARKED)
    tokenizer = str(tmp_path / "tokenizer.json")
    expected = row_of(data, tokenizer=tokenizer, template=str(tmp_path / "given.jinja"))
    assert row_of(data, tokenizer=tokenizer) == expected
    assert expected != row_of(data, tokenizer=str(folder / "tokenizer.json"))


#: Templates whose prompt for an answer opens a thought.
THINKING = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>
{% endfor %}{% if add_generation_prompt %}<|assistant|><think>
{% endif %}"""


@pytest.mark.parametrize(("answer", "prompt"), [("it is noon", "<think>\n"), ("<think>\nso</think>noon", "")])
def test_an_answer_without_the_thought_that_its_prompt_opens_is_learned(
    folder: Path, tmp_path: Path, answer: str, prompt: str
) -> None:
    (tmp_path / "t.jinja").write_text(THINKING)
    chat = [{"role": "user", "content": "time?"}, {"role": "assistant", "content": answer}]
    data = written(tmp_path / "chats.jsonl", {"messages": chat})
    options: dict[str, Any] = {"tokenizer": str(folder / "tokenizer.json"), "template": str(tmp_path / "t.jinja")}
    tokens, learned = row_of(data, **options)
    opened = tokenizers.Tokenizer.from_file(options["tokenizer"])
    said = opened.decode([each for each, counts in zip(tokens, learned, strict=True) if counts], False)
    assert said == (answer if prompt else answer.removeprefix("<think>\n")) + "</s>\n"
    told = source(data, **options).summary(200, 0)
    assert (f"not learned, since responses lack it: {prompt!r}" in told) == bool(prompt)


def test_an_answer_that_is_rendered_otherwise_later_is_still_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last else '' }}{% endfor %}"
    )
    data = written(tmp_path / "chats.jsonl", {"messages": CHATS[1]})
    with pytest.raises(DataError, match="the template renders message 2 otherwise when others follow"):
        row_of(data, tokenizer=str(folder / "tokenizer.json"), template=str(tmp_path / "t.jinja"))


def test_a_run_has_one_date_which_it_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another day does not make other data of it; a run that was begun before dates were recorded has none."""
    monkeypatch.chdir(tmp_path)
    Path("dated.jinja").write_text("{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}")
    data = written(tmp_path / "c.jsonl", {"prompt": "day?", "response": "yes"})
    assert bytes(row_of(data, template="dated.jinja", date="2001-02-03")[0][:11]) == b"03 Feb 2001"
    with pytest.raises(ValidationError, match="date"):
        InstructOptions(paths=("c.jsonl",), date="someday")

    def planned(*more: str) -> Any:
        keys = (f"data.paths={data}", "run.folder=r", *more)
        return load_config("preset:tiny", plugins=("data=instruct",), sets=keys)

    assert planned().config.data.options["date"] == date.today().isoformat()
    assert planned("data.date=2001-02-03").config.data.options["date"] == "2001-02-03"
    assert take_over(hand_over(planned())).config.data.options["date"] == date.today().isoformat()
    for name, keys, expected in (("r", {"data.date": "1999-12-31"}, "1999-12-31"), ("r", {}, None)):
        Path(name).mkdir(exist_ok=True)
        Path(name, "run.json").write_text(json.dumps({"identity": keys}))
        assert planned().config.data.options["date"] == expected
    Path("r/run.json").unlink()
    Path("base").mkdir()
    Path("base/run.json").write_text(json.dumps({"identity": {"data.date": "1999-12-31"}}))
    assert planned("run.branch_from=base@3").config.data.options["date"] == "1999-12-31"


def test_without_a_template_turns_are_lines_and_the_text_ends(tmp_path: Path) -> None:
    data = written(tmp_path / "pairs.jsonl", {"prompt": "2+2?", "response": "4"})
    tokens, learned = row_of(data)
    assert bytes(tokens[:-1]).decode() == "User: 2+2?\nAssistant: 4\n"
    assert tokens[-1] == 256
    assert [token for token, counts in zip(tokens, learned, strict=True) if counts] == [*b"4\n", 256]
    assert "lines of Role: text" in source(data).summary(64, 0)


def test_packed_conversations_are_those_alone(tmp_path: Path) -> None:
    records = [{"prompt": "q" * n, "response": "a" * (n % 7 + 1)} for n in range(1, 40)]
    data = written(tmp_path / "pairs.jsonl", *records)
    found, expected = list[Any](), list[Any]()
    for packing, into in (("documents", found), ("none", expected)):
        dataset = source(data, packing=packing).dataset("train", 100, 0)
        for index in range(len(dataset)):
            row = {name: np.asarray(value) for name, value in dataset[index].items()}
            for start, stop in pairwise(row["documents"].tolist()):
                if row["loss_mask"][start:stop].any():
                    into.append([row[name][start:stop].tolist() for name in ("tokens", "labels", "loss_mask")])
    assert sorted(found) == sorted(expected)
    assert len(source(data, packing="documents").dataset("train", 100, 0)) < len(records) / 2


def test_what_is_cut_and_what_is_left_out_is_told(tmp_path: Path) -> None:
    fits, long, silent = ({"prompt": "q" * a, "response": "a" * b} for a, b in ((3, 3), (3, 90), (90, 3)))
    path = written(tmp_path / "pairs.jsonl", fits, long, silent)
    path.write_text(path.read_text() + "{broken\n")
    told = source(path, malformed="skip").summary(40, 0)
    assert told.startswith("2 conversations in 2 rows of 40 tokens")
    for part in ("1 longer than a row lost their end", "1 whose response begins beyond a row", "1 malformed line "):
        assert part in told
    length = int(told.partition("; train.sequence_length=")[2].split()[0])
    whole, less = (source(path, malformed="skip").summary(each, 0) for each in (length, length - 1))
    assert "lost their end" in less
    assert not re.search("lost their end|beyond a row|train.sequence_length", whole)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "no JSON"),
        ("[1]", "a list, and must be an object"),
        ('{"prompt": "a"}', "has 'prompt', and must have"),
        ('{"prompt": "a", "response": 3}', "content of message 1 is a number"),
        ('{"messages": []}', "list of one or more"),
        ('{"messages": ["a"]}', "message 0 is text"),
        ('{"messages": [{"content": "a"}]}', "role of message 0 is missing"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "nothing to learn"),
        (
            '{"messages": [{"role": "usr", "content": "a"}, {"role": "assistant", "content": "b"}]}',
            "role of message 0 is 'usr'; did you mean 'user'",
        ),
        ('{"prompt": "\ufdd0", "response": "b"}', "U\\+FDD0"),
        (r'{"prompt": "a", "response": "b\ud800"}', "content of message 1 has half of a surrogate pair"),
        ("[" * 100_000, "nested too deeply|no JSON"),
    ],
)
def test_a_malformed_line_is_named_by_file_and_line(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(f'{{"prompt": "a", "response": "b"}}\n\n{line}\n', encoding="utf-8")
    with pytest.raises(DataError, match=rf"chats.jsonl:3 is no conversation.*({why})") as error:
        source(path).dataset("train", 32, 0)
    assert "\n" not in str(error.value)


def test_without_files_it_says_what_to_name() -> None:
    with pytest.raises(DataError, match=r"data.paths.*chats.jsonl"):
        megatron_run_create_data(InstructOptions())


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_bytes(b'{"prompt": "\xff", "response": "b"}\n')
    with pytest.raises(DataError, match=r"chats.jsonl:1 .* UTF-8"):
        source(tmp_path / "chats.jsonl").dataset("train", 32, 0)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "chat template of .* is broken: line 1"),
        ("{{ raise_exception('only two turns') }}", r"chats.jsonl:1 .*only two turns"),
        ("{{ messages.__class__.__mro__ }}", r"chats.jsonl:1 .*(unsafe|refuses)"),
        ("{% set _ = messages.append(1) %}", r"chats.jsonl:1 .*(unsafe|refuses)"),
        ("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}", r"message 1 otherwise"),
    ],
)
def test_a_template_that_fails_or_escapes_is_one_line(tmp_path: Path, template: str, message: str) -> None:
    data = written(tmp_path / "chats.jsonl", {"messages": CHATS[1][1:]})
    (tmp_path / "bad.jinja").write_text(template)
    with pytest.raises(DataError, match=message):
        source(data, template=str(tmp_path / "bad.jinja")).dataset("train", 64, 0)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for i in range(9**5) %}{% for j in range(9**5) %}{% endfor %}{% endfor %}", "renders for seconds"),
        ("{{ 'a' * 9**11 }}", "more than 2 GiB"),
        ("{{ '%3000000000d' % 1 }}", "more than 2 GiB"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "nested too deeply"),
    ],
)
def test_a_template_has_limits_of_time_and_memory(template: str, why: str) -> None:
    with pytest.raises(Broken, match=why):
        Renderer(template, seconds=0).render({})


def test_a_macro_without_end_is_refused_and_the_next_text_is_rendered() -> None:
    renderer = Renderer("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) if a else 'next' }}")
    with pytest.raises(Refused, match="without end"):
        renderer.render({"a": 1})
    assert renderer.render({"a": 0}) == "next"


def test_splits_are_disjoint_and_a_new_line_moves_no_other(tmp_path: Path) -> None:
    records = [{"prompt": f"question {n}", "response": f"answer {n}"} for n in range(60)]

    def split_up(path: Path) -> list[set[bytes]]:
        splits = []
        for split in ("train", "validation", "test"):
            dataset = source(path, split="60,20,20").dataset(split, 64, 0)
            rows = [np.asarray(dataset[index]["tokens"]) for index in range(len(dataset))]
            splits.append({bytes(row[row < 256].tolist()) for row in rows})
        return splits

    before = split_up(written(tmp_path / "a.jsonl", *records))
    after = split_up(written(tmp_path / "b.jsonl", {"prompt": "new", "response": "one"}, *records))
    assert sum(map(len, before)) == len(set.union(*before)) == 60
    assert all(some <= more for some, more in zip(before, after, strict=True))


def conforming() -> tuple[Check, ...]:
    return data_checks(source(Path(__file__).with_name("chats.jsonl"), split="60,20,20", packing="documents"))


@pytest.mark.parametrize("check", conforming(), ids=lambda check: check.name)
def test_it_conforms(check: Check) -> None:
    check.run()


def test_a_run_learns_to_answer(tmp_path: Path) -> None:
    data = written(tmp_path / "pairs.jsonl", *({"prompt": f"{n}?", "response": "yes"} for n in range(40)))
    sets = (f"data.paths={data}", "data.split=100,0,0", "train.steps=16", "train.lr=2e-2", "eval.interval=0")
    small = ("model.num_layers=1", "train.global_batch_size=2")
    (seen,) = train(1, sets=(*sets, *small), plugins=("data=instruct",))
    assert seen.losses[-1] < seen.losses[0] / 3
