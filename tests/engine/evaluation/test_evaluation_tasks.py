"""Perplexity, WikiText-103 and LAMBADA, beside plain computations from transformers' logits."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron_run.errors import RunError
from megatron_run.planning import load_config
from megatron_run_engine.evaluation.tasks import TextReader, _cloze, detokenize
from megatron_run_engine.runtime.generation import Window, score
from megatron_run_engine.runtime.generation.scoring import IGNORED
from megatron_run_inference import LoadedModel, load
from tests.support.training_bench import Bench

#: The longest sequence of the model.
POSITIONS = 16
TEXT = (
    "the quick brown fox jumps over the lazy dog , and then it sleeps .\n"
    "a fox is not a dog ; the dog knows , the fox does not care at all .\n"
) * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GPT-2 with a tokenizer of its own, in transformers' files."""
    import tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel

    made = tmp_path_factory.mktemp("gpt2")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([TEXT], vocab_size=300, min_frequency=1, special_tokens=["<|endoftext|>"])
    tokenizer.save(str(made / "tokenizer.json"))
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=tokenizer.get_vocab_size(),
        n_positions=POSITIONS,
        n_embd=32,
        n_layer=2,
        n_head=4,
        initializer_range=0.3,
    )
    GPT2LMHeadModel(config).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load(folder, device="cpu")


@pytest.fixture(scope="module")
def losses(folder: Path) -> Any:
    """The loss of each of ``tokens[1:]``, each given at most the model's positions before it, one by one."""
    from transformers import GPT2LMHeadModel

    oracle = GPT2LMHeadModel.from_pretrained(folder).eval()

    @torch.no_grad()
    def loss_of(tokens: list[int], start: int, place: int) -> tuple[float, bool]:
        logits = oracle(torch.tensor([tokens[start:place]])).logits[0, -1].double()
        return -torch.log_softmax(logits, 0)[tokens[place]].item(), int(logits.argmax()) == tokens[place]

    return loss_of


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.nightly), 5, POSITIONS])
def test_perplexity_gives_each_token_the_context_of_its_window(
    model: LoadedModel, losses: Any, tmp_path: Path, stride: int
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    tokens = model.encode(TEXT)
    expected = []
    for place in range(1, len(tokens)):
        window = max(0, math.ceil((place - POSITIONS) / stride))  # the first window in which it is a target
        expected.append(losses(tokens, window * stride, place)[0])
    (found,) = model.evaluate(f"perplexity={tmp_path / 'text.txt'}", stride=stride, batch=3)
    assert found.tokens == len(tokens) - 1
    assert found.loss == pytest.approx(sum(expected) / len(expected), abs=1e-5)
    assert found.metrics["perplexity"] == pytest.approx(math.exp(found.loss))
    bits = sum(expected) / math.log(2) / (len(TEXT.encode()) - len(model.decode(tokens[:1]) or ""))
    assert found.metrics["bits_per_byte"] == pytest.approx(bits, abs=1e-5)


def test_wikitext_divides_the_loss_by_the_original_tokens(model: LoadedModel, losses: Any, tmp_path: Path) -> None:
    (tmp_path / "wiki.test.tokens").write_text(TEXT)
    tokens = model.encode(detokenize(TEXT))
    total = 0.0
    for place in range(1, len(tokens)):
        window = max(0, math.ceil((place - POSITIONS) / 4))
        total += losses(tokens, window * 4, place)[0]
    (found,) = model.evaluate(f"wikitext={tmp_path / 'wiki.test.tokens'}", stride=4)
    original = len(TEXT.strip().split(" ")) - 1  # as Megatron-LM's tasks/zeroshot_gpt/evaluate.py
    assert found.metrics["perplexity"] == pytest.approx(math.exp(total / original), rel=1e-5)
    assert found.at_step(3).perplexity == found.metrics["perplexity"]
    assert found.at_step(3).extra == {"token_ratio": (len(tokens) - 1) / original}


def test_lambada_wants_every_token_of_the_last_word(model: LoadedModel, losses: Any, tmp_path: Path) -> None:
    passages = [line for line in TEXT.replace(" .", "").splitlines() for line in (line, f"{line} jumps", "a fox")]
    written = model.generate(["the quick brown", "a fox"], max_new_tokens=6, temperature=0)
    passages += [f"the quick brown{each.text}" for each in written if each.text and len(each.text.split()) > 1]
    expected = []
    for passage in passages:
        context, word = passage.strip().rsplit(maxsplit=1)
        before, target = model.encode(context), model.encode(f" {word}")
        tokens = [*before, *target][-(POSITIONS + 1) :]
        places = range(len(tokens) - len(target), len(tokens))
        expected.append(all(losses(tokens, 0, place)[1] for place in places))
    lines = [json.dumps({"text": passage}) if number % 2 else passage for number, passage in enumerate(passages)]
    (tmp_path / "lambada.jsonl").write_text("\n".join(lines) + "\n")
    (found,) = model.evaluate(f"lambada={tmp_path / 'lambada.jsonl'}")
    assert found.metrics == {"accuracy": sum(expected) / len(expected)}


def test_a_word_that_the_model_would_write_is_right(model: LoadedModel, tmp_path: Path) -> None:
    """Greedy decoding after parts of the text; where it writes a word of one token, that word is guessed."""
    words = TEXT.split()
    for first, size in product(range(30), (1, 2, 3)):
        context = " ".join(words[first : first + size])
        (written,) = model.generate([context], max_new_tokens=1, temperature=0)
        if written.text and written.text.startswith(" ") and model.encode(written.text) == list(written.tokens):
            break
    else:
        pytest.fail("no part was continued by a word of one token")
    for word, accuracy in ((written.text, 1.0), (" zebra", 0.0)):
        (tmp_path / "one.txt").write_text(f"{context}{word}")
        (found,) = model.evaluate(f"lambada={tmp_path / 'one.txt'}")
        assert found.metrics["accuracy"] == accuracy


def test_one_right_token_of_two_is_not_enough(model: LoadedModel) -> None:
    prompt = model.encode("the quick")
    (written,) = model.generate([prompt], max_new_tokens=2, temperature=0)
    first, second = written.tokens
    windows = [Window.of([*prompt, first, token], len(prompt)) for token in (second, second + 1)]
    right, half = score(model.network, windows)
    assert (right.likeliest, right.targets, right.greedy) == (2, 2, True)
    assert (half.likeliest, half.targets, half.greedy) == (1, 2, False)


def prefixing_reader(texts: list[str]) -> tuple[Any, TextReader]:
    """A tokenizer of Llama 2's kind, which puts a space before each text, and what reads with it."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(pieces)
    made.pre_tokenizer = pre_tokenizers.Split(Regex("(?<!▁)(?=▁)"), "isolated")
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(texts * 50, trainers.BpeTrainer(vocab_size=330, special_tokens=special))
    data = SimpleNamespace(encode=lambda text: made.encode(text).ids, decode=made.decode)
    return made, TextReader(cast("Any", data), 64, 0, made.get_vocab_size())


def test_the_last_word_is_encoded_as_it_stands_in_the_passage() -> None:
    passage = "the cat sat on the mat and ran to the park"
    tokenizer, reader = prefixing_reader([passage, "a dog ran to a park"])
    window = _cloze(f"{passage} \n", reader)
    whole, before = tokenizer.encode(passage).ids, tokenizer.encode(passage.removesuffix(" park")).ids
    scored = [target for target in window.targets if target != IGNORED]
    assert [*window.inputs, window.targets[-1]] == whole
    assert whole == [*before, *scored]
    assert [tokenizer.id_to_token(token) for token in scored] == ["▁park"]


def test_a_last_word_that_cannot_be_scored_is_named() -> None:
    data = SimpleNamespace(
        encode=lambda text: [ord(letter) for letter in text if letter.isalpha() and letter.isascii()]
    )
    for passage, message in (
        ("ab ü", "the last word of 'ab ü' has no token: the tokenizer leaves it out"),
        ("ü a", "the last word of 'ü a' has nothing before it: one token is all of it"),
    ):
        with pytest.raises(RunError, match=f"^{message}$"):
            _cloze(passage, TextReader(cast("Any", data), 8, 0, 128))


def test_bits_per_byte_are_of_the_bytes_that_are_scored(tmp_path: Path) -> None:
    """A model that finds all 257 bytes equally likely needs log2(257) bits for each, however short the texts are."""
    (tmp_path / "a.txt").write_text("some words here " * 40)
    sets = ("data.use=text", f"data.paths={tmp_path / 'a.txt'}", "data.split=1,0,0", "train.steps=1", "train.lr=1e-9")
    bench = Bench(tmp_path, *sets, "model.init_std=1e-6")
    bench.train()
    model = load(bench.folder, device="cpu")
    for number, texts in enumerate((["ab"] * 9, ["üa", "x"], ["🙂"], ["long " * 30, "ab"])):
        (tmp_path / str(number)).mkdir()
        for file, text in enumerate(texts):
            (tmp_path / str(number) / f"{file}.txt").write_text(text)
        (found,) = model.evaluate(f"perplexity={tmp_path / str(number)}")
        assert found.metrics["bits_per_byte"] == pytest.approx(math.log2(257), rel=1e-4), texts


def test_the_first_token_may_be_a_space_that_the_tokenizer_adds() -> None:
    tokenizer, reader = prefixing_reader(["the dog"])
    for text, first, size in (("the dog", "▁the", 3), ("über", "▁", 0), ("  x", "▁", 0)):
        tokens = reader.encode(text)
        assert tokenizer.id_to_token(tokens[0]) == first
        assert reader.bytes_of_first(text, tokens) == size


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (" \n = Valkyria Chronicles III = \n \n", "\n= Valkyria Chronicles III =\n\n"),
        (" = = Plot = = \n", " == Plot ==\n"),
        ("in 1 @,@ 000 role @-@ playing games ( PSP ) , 3 @.@ 5", "in 1,000 role-playing games (PSP), 3.5"),
        ("He said , \" It 's the boys ' game \" . ", "He said, \"It's the boys' game\". "),
        ("did n't cost $ 5 , 20 % off ; see : this", "didn't cost $5, 20% off; see: this"),
    ],
)
def test_traces_of_tokenisation_are_removed(raw: str, text: str) -> None:
    assert detokenize(raw) == text


@pytest.mark.parametrize(
    ("task", "content", "message"),
    [
        (
            "lambda={}",
            "a b",
            "there is no task 'lambda'; did you mean 'lambada'? write perplexity=FILE, wikitext=FILE, lambada=FILE",
        ),
        ("lambada", "", "task lambada of what? Write lambada=FILE"),
        ("lambada={}", "word\n", "line 1 of {} has no word to guess: it needs at least two words"),
        ("lambada={}", '{"txt": "a b"}\n', "line 1 of {} is no passage: JSON with the field 'text' is expected"),
        ("perplexity={}", "a", "{} has nothing to score: task perplexity found no token after another one"),
        ("wikitext={}", "word", "{} has nothing to score: task wikitext counts the words after the first"),
        ("wikitext={}.gone", "", "{}.gone cannot be read: No such file or directory; did you mean 'file'?"),
        (
            "perplexity={}.gone",
            "",
            "data file {0}.gone does not exist (from perplexity={0}.gone); did you mean 'file'?",
        ),
        ("perplexity=test", "", "this model came without data: test is a split of a run's own data"),
    ],
)
def test_mistakes_are_one_line(model: LoadedModel, tmp_path: Path, task: str, content: str, message: str) -> None:
    path = tmp_path / "file"
    path.write_text(content or " ")
    with pytest.raises(RunError) as caught:
        model.evaluate(task.format(path))
    assert str(caught.value) == message.format(path)


def test_json_lines_are_scored_by_their_texts_and_refused_without(model: LoadedModel, tmp_path: Path) -> None:
    texts = ["def f(): pass", "class A: ..."]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    (tmp_path / "b").mkdir()
    for number, each in enumerate(texts):
        (tmp_path / "b" / f"{number}.txt").write_text(each)
    records, files = model.evaluate(f"perplexity={tmp_path / 'a.jsonl'}", f"perplexity={tmp_path / 'b'}")
    assert (records.loss, records.tokens) == (files.loss, files.tokens)
    path = tmp_path / "c.jsonl"
    path.write_text('{"messages": []}\n')
    with pytest.raises(RunError) as caught:
        model.evaluate(f"perplexity={path}")
    why = "of JSON lines data=text reads the key 'text'"
    assert str(caught.value) == f"{path}:1 is no record with a text: {why} (from perplexity={path})"


def test_without_a_tokenizer_one_is_asked_for() -> None:
    with pytest.raises(RunError, match=r"no tokenizer: a task reads text; name it: --plugin data=text,tokenizer=FILE$"):
        TextReader(None, 8, 0, 257).encode("text")


def test_a_training_evaluates_its_tasks_each_time(tmp_path: Path) -> None:
    """The same numbers as those of the model that the run leaves, and in the order of the configuration."""
    (tmp_path / "a.txt").write_text("def f(): pass\n" * 200)
    (tmp_path / "b.txt").write_text("def g(): pass\n" * 5)
    tasks = [f"lambada={tmp_path / 'b.txt'}", f"perplexity={tmp_path / 'b.txt'}"]
    sets = (
        "data.use=text",
        f"data.paths={tmp_path / 'a.txt'}",
        "train.steps=4",
        "eval.interval=2",
        "model.dropout=0.5",
    )
    bench = Bench(tmp_path, *sets, f"eval.tasks={','.join(tasks)}")
    bench.train()
    seen = [(metrics.step, metrics.split) for metrics in bench.watch.evaluations]
    splits = ("validation", "lambada", "perplexity")
    assert seen == [(step, split) for step in (2, 4) for split in splits]
    model = load(bench.folder, device="cpu")
    for result, metrics in zip(model.evaluate(*tasks), bench.watch.evaluations[-2:], strict=True):
        assert metrics.loss == pytest.approx(result.loss, abs=1e-6)
        assert metrics.extra == {name: pytest.approx(value) for name, value in metrics.extra.items()}
    assert bench.watch.evaluations[-1].loss != bench.watch.evaluations[2].loss


def test_a_task_that_is_none_is_refused_before_the_run() -> None:
    with pytest.raises(
        RunError,
        match=r"eval\.tasks.*there is no task 'lambda'; did you mean 'lambada'\? write perplexity=FILE, wikitext=FILE",
    ):
        load_config("preset:tiny", sets=("eval.tasks=lambda=x",))
