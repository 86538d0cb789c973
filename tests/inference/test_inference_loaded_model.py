"""Loaded models: logits with caches and without and those of transformers, texts and their ends, what is refused."""

from __future__ import annotations

import copy
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from megatron_run import RunError, load, load_config
from megatron_run.contracts import Decoding, EvalMetrics, Observer
from megatron_run_engine import train
from megatron_run_engine.formats.convert import import_model
from megatron_run_engine.runtime.generation import Generation, Sampling, TextTokens
from megatron_run_engine.runtime.world import World
from megatron_run_inference import LoadedModel, loading
from megatron_run_inference.evaluation import record
from tests.support.notebook_cell import Cell
from tests.support.small_models import GPT2, LENGTH, LLAMA, saved_network

EXPERTS = {**LLAMA, "experts.count": 4, "experts.capacity_factor": 0.25}


def theirs(family: str) -> Any:
    """A small model of transformers, which is loaded here: every worker reads this file, and one runs it."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if family == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=24, n_head=3, vocab_size=61, n_positions=LENGTH))
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=24,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=40,
        vocab_size=61,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model of transformers with weights that matter, and the folder that holds it."""
    model, folder = theirs(request.param).eval(), tmp_path_factory.mktemp(request.param)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    model.save_pretrained(folder)
    return model, folder


def table(rows: int, columns: int) -> Tensor:
    return torch.randint(61, (rows, columns), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def test_logits_are_those_of_transformers_from_its_folder_and_from_an_import(
    pair: tuple[Any, Path], tmp_path: Path
) -> None:
    theirs, folder = pair
    expected = theirs(table(2, LENGTH)).logits
    import_model(folder, tmp_path / "ours")
    for path in (folder, tmp_path / "ours", tmp_path / "ours" / "checkpoints" / "step0"):
        torch.testing.assert_close(load(path)(table(2, LENGTH)), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_greedy_texts_are_those_of_transformers_in_a_batch_of_unequal_lengths(pair: tuple[Any, Path]) -> None:
    theirs, folder = pair
    prompts = [table(1, 9)[0].tolist(), [3, 5], [60, 1, 2, 3, 4]]
    options: dict[str, Any] = {"max_new_tokens": 7, "repetition_penalty": 1.3}
    for prompt, text in zip(prompts, load(folder).generate(prompts, temperature=0, **options), strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]), do_sample=False, eos_token_id=None, pad_token_id=0, **options
        )
        assert [*text.prompt_tokens, *text.tokens] == expected[0].tolist()


@pytest.fixture(scope="module", params=["gpt2", "llama", "experts"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp(request.param)
    saved_network(folder, {"gpt2": GPT2, "llama": LLAMA, "experts": EXPERTS}[request.param])
    loaded: LoadedModel = load(folder)
    return loaded


def test_updates_by_hand_are_those_of_torch(pair: tuple[Any, Path]) -> None:
    theirs, folder = copy.deepcopy(pair[0]).eval(), pair[1]
    model, tokens = load(folder), table(3, 9)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(3):
        loss = theirs(tokens, labels=tokens).loss
        assert abs(model.step(tokens, lr=1e-2) - float(loss.detach())) < 1e-4
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        assert torch.allclose(model(tokens), theirs(tokens).logits, atol=2e-3)
    with pytest.raises(RunError, match="rows of equally many tokens"):
        model.step([[1, 2, 3], [1, 2]])
    with pytest.raises(RunError, match="weights are bf16"):
        load(folder, sets={"train.precision": "bf16"}).step(tokens)


@torch.no_grad()
def test_logits_with_caches_are_those_without(model: LoadedModel) -> None:
    """Read in one pass, or in passes of 5, 1, 1, 3 and 6 columns, the middle rows padded."""
    tokens, missing = table(3, LENGTH), [0, 4, 2]
    padding, caches, first = torch.tensor(missing), dict[int, Any](), 0
    found = []
    for size in (5, 1, 1, 3, 6):
        columns, keys = torch.arange(first, first + size), torch.arange(first + size)
        mask = (keys <= columns[:, None]) & (keys >= padding[:, None, None, None])
        places = (columns - padding[:, None]).clamp(min=0)
        decoding = Decoding(first, padding, caches, places, mask)
        found.append(model.network.logits(tokens[:, first : first + size], decoding))
        first += size
    together = torch.cat([each for each in found if each is not None]).transpose(0, 1)
    for row, count in enumerate(missing):
        alone = model.network.logits(tokens[row : row + 1, count:], Decoding())
        assert alone is not None
        torch.testing.assert_close(together[row, count:], alone[:, 0], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_caches_without_padding_need_no_mask(model: LoadedModel) -> None:
    tokens, caches = table(2, 9), dict[int, Any]()
    whole = model.network.logits(tokens, Decoding())
    parts = [
        model.network.logits(tokens[:, first:stop], Decoding(first, caches=caches))
        for first, stop in ((0, 4), (4, 5), (5, 9))
    ]
    assert whole is not None
    torch.testing.assert_close(torch.cat([part for part in parts if part is not None]), whole, atol=1e-5, rtol=1e-5)


def test_nothing_but_training_drops_tokens(tmp_path: Path) -> None:
    saved_network(tmp_path, EXPERTS)
    model, tokens = load(tmp_path), table(1, LENGTH)
    kept = model.network.logits(tokens, Decoding())
    assert kept is not None
    torch.testing.assert_close(model(tokens)[0], kept[:, 0])
    for chunk in model.network.chunks:
        chunk.train()
    assert not torch.allclose(model(tokens)[0], kept[:, 0], atol=1e-3)


def test_rows_that_have_ended_leave_the_others_as_they_are(model: LoadedModel) -> None:
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8], [9, 9]]
    whole = model.generate(prompts, temperature=0, max_new_tokens=10)
    rows = [TextTokens(list(prompt)) for prompt in prompts]
    most = {id(row): 2 * number + 2 for number, row in enumerate(rows)}  # they end one after another
    for row in Generation(model.network, rows, Sampling(0)).steps():
        most[id(row)] -= 1
        row.ended = not most[id(row)]
    for number, (row, text) in enumerate(zip(rows, whole, strict=True)):
        assert row.tokens == [*text.prompt_tokens, *text.tokens[: 2 * number + 2]]


TEXT = "abcdefgh. "


class Sample(Observer):
    """Keeps the sample of a training."""

    def __init__(self) -> None:
        self.text = ""

    def on_sample(self, text: str) -> None:
        self.text = text


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, str]:
    """A model that has learned to write TEXT over and over, and the sample at the end of its training."""
    folder, sample = tmp_path_factory.mktemp("bytes"), Sample()
    (folder / "a.txt").write_text(TEXT * 400)
    sets = {
        "run.folder": folder / "run",
        "run.threads": 1,
        "data.use": "text",
        "data.paths": str(folder / "a.txt"),
        "model.num_layers": 1,
        "train.steps": 40,
        "train.lr": 2e-2,
        "eval.interval": 0,
        "eval.sample": 20,
        "eval.prompt": "xyz",
        "observer.use": "jsonl",
    }
    train(load_config("preset:tiny", sets=sets, plugins=[sample]))
    return load(folder / "run"), sample.text


@pytest.fixture
def bytes_model(trained: tuple[LoadedModel, str]) -> LoadedModel:
    return trained[0]


def test_a_trained_model_continues_its_text(bytes_model: LoadedModel) -> None:
    (text,) = bytes_model.generate("abc", temperature=0, max_new_tokens=45)
    assert str(text) == (TEXT * 9)[: len("abc") + 45]
    assert (text.prompt, text.finish, len(text.tokens)) == ("abc", "length", 45)
    assert "".join(bytes_model.stream("abc", temperature=0, max_new_tokens=45)) == text.text


def test_a_loaded_model_knows_the_curves_of_its_run(trained: tuple[LoadedModel, str]) -> None:
    model, _ = trained
    assert len(model.history.losses) == model.source.step
    assert "Training loss" in model.history.plot(names=["loss"]).svg


def test_a_notebook_sees_how_far_a_load_is_that_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    saved_network(tmp_path, GPT2)
    load(tmp_path)
    assert capfd.readouterr() == ("", "")  # neither a notebook nor a terminal
    cell = Cell(monkeypatch)
    monkeypatch.setattr(loading, "Console", lambda stderr: Console(force_jupyter=True))
    load(tmp_path)
    assert not cell.outputs  # it was soon done
    monkeypatch.setattr(loading, "PATIENCE", 0.0)
    load(tmp_path)
    checked, read = (output["text/plain"] for output in cell.outputs)
    assert re.fullmatch(r"checking (\d+)/\1  MB", checked)
    assert re.fullmatch(r"loading (\d+)/\1  tensors", read)
    # Ranks share a terminal. There is no other one here, so that no model is built.
    monkeypatch.setattr(loading, "join_world", lambda run, world: world)
    monkeypatch.setattr(loading, "LoadedModel", lambda run, source, world, watch: watch(1, 1))
    for rank, shown in ((1, 2), (0, 4)):
        monkeypatch.setattr(loading, "find_world", lambda environment, rank=rank: World(rank=rank, size=2))
        load(tmp_path)
        assert len(cell.outputs) == shown


def test_the_sample_of_a_training_is_what_generate_writes(trained: tuple[LoadedModel, str]) -> None:
    model, sample = trained
    (text,) = model.generate("xyz", temperature=0.8, seed=1234, max_new_tokens=20)
    assert sample == str(text)


def test_a_stop_string_ends_a_text_and_is_left_out(bytes_model: LoadedModel) -> None:
    for stop, expected in (
        (". ", "defgh"),
        (("zebra", "fg"), "de"),
        ("d", ""),
        (["gh. abcx", "h. abcdef", "cdef"], "defg"),
    ):
        pieces = list(bytes_model.stream("abc", temperature=0, stop=stop))
        assert "".join(pieces) == expected
        (text,) = bytes_model.generate("abc", temperature=0, stop=stop)
        assert (text.text, text.finish) == (expected, "stop")


def test_a_stop_token_and_the_end_of_a_text_end_it(bytes_model: LoadedModel) -> None:
    (text,) = bytes_model.generate(["abc"], temperature=0, stop_tokens=[ord("f")])
    assert (text.text, text.tokens[-1], text.finish) == ("de", ord("f"), "stop")
    assert bytes_model.data is not None
    assert bytes_model.data.end_of_text == 256
    (empty,) = bytes_model.generate("", max_new_tokens=1)
    assert empty.prompt_tokens == (256,)


@pytest.mark.parametrize(
    ("prompts", "options", "said"),
    [
        (["x" * 33], {}, "a prompt is too long: 33 tokens, and the model has 32 positions"),
        ([[1, 300]], {}, "token 300 is outside the model's vocabulary of 257"),
        ([[]], {"past_end": True}, ""),
        (["a"], {"num": 0}, "num=0: it must be at least 1"),
        (["a"], {"max_new_tokens": 0}, "max_new_tokens=0: it must be at least 1"),
        (["a"], {"stop": ["a", ""]}, "a stop string is empty"),
        (["a"], {"num": 10**14}, "num=100000000000000: it must be at most 65536"),
        (["a"], {"stop_tokens": [1, 257]}, "token 257 is outside the model's vocabulary of 257"),
    ],
)
def test_what_cannot_be_written_is_refused(
    bytes_model: LoadedModel, prompts: Any, options: dict[str, Any], said: str
) -> None:
    if not said:
        assert bytes_model.generate(prompts, max_new_tokens=1, **options)[0].prompt_tokens == (256,)
        return
    with pytest.raises(RunError) as error:
        bytes_model.generate(prompts, **options)
    assert str(error.value).startswith(said)


def test_a_run_is_taken_as_its_last_attempt_left_it(tmp_path: Path) -> None:
    def goes_on(steps: int, plugins: list[str], observers: str) -> None:
        sets = {"run.folder": tmp_path / "run", "run.threads": 1, "train.steps": steps, "train.lr_warmup": 0}
        chosen = {"observer.use": observers, "eval.interval": 0, "eval.sample": 0, "parallel.tensor": 1}
        train(load_config("preset:tiny", sets={**sets, **chosen}, plugins=plugins), extend=steps > 1)

    goes_on(1, [], "console")
    assert load(tmp_path / "run").run.one("parallel-layer").name == "dense"
    goes_on(2, ["parallel-layer=tensor"], "jsonl")
    model = load(tmp_path / "run")
    assert (model.source.step, model.run.one("parallel-layer").name) == (2, "tensor")
    assert record(model.source, [EvalMetrics(2, "lambada", 1.5, 4.5, 8)]) == tmp_path / "run"
    assert '"lambada"' in (tmp_path / "run" / "eval.jsonl").read_text()


def test_a_run_on_split_samples_is_loaded_without_a_split(tmp_path: Path) -> None:
    plugins = ["parallel-layer=dense+context"]  # which suggests two ranks
    sets = {"run.folder": tmp_path / "run", "run.threads": 1, "train.steps": 1, "parallel.context": 1}
    train(load_config("preset:tiny", sets=sets, plugins=plugins))
    model = load(tmp_path / "run")
    assert [each.name for each in model.run.plugins["parallel-layer"]] == ["dense", "context"]
    assert model([[1, 2, 3]]).isfinite().all()
    with pytest.raises(RunError, match=r"parallel.context=2 splits nothing here"):
        load(tmp_path / "run", sets={"parallel.context": 2})


def test_folders_without_a_model_or_with_another_one_are_refused(bytes_model: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "started").mkdir()
    (tmp_path / "started" / "run.json").write_text("{}")
    for path, said in (
        (tmp_path / "none", f"no checkpoints in {tmp_path / 'none'}"),
        (tmp_path / "started", f"no checkpoints in {tmp_path / 'started'}: no step is saved there"),
        (tmp_path, f"there is no model in {tmp_path}"),
    ):
        with pytest.raises(RunError) as error:
            load(path)
        assert str(error.value).startswith(said)
    run = bytes_model.source.path.parents[1]
    with pytest.raises(
        RunError, match=r"the weights in .* are of another model: .* is \[257, 32\] there, \[257, 48\] here"
    ):
        load(run, sets={"model.hidden_size": 48})
    with pytest.raises(RunError, match="one process cannot be 2 ranks; start the program with torchrun"):
        load(run, sets={"parallel.data": 2})
    shutil.copytree(run, tmp_path / "copy")
    (shard,) = (tmp_path / "copy" / "checkpoints" / "step40").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(RunError, match=f"{shard.name} is damaged"):
        load(tmp_path / "copy")


def test_a_model_without_a_tokenizer_takes_ids_or_a_tokenizer(tmp_path: Path) -> None:
    saved_network(tmp_path, {**GPT2, "vocab_size": 257})
    model = load(tmp_path)
    with pytest.raises(RunError, match=r"has no tokenizer: only its weights lie there; name its tokenizer"):
        model.generate("text")
    (text,) = model.generate([[1, 2]], max_new_tokens=3)
    assert (text.prompt, text.text, len(text.tokens)) == (None, None, 3)
    assert str(text) == " ".join(map(str, [1, 2, *text.tokens]))
    assert load(tmp_path, sets=["data.use=text"]).generate("text", max_new_tokens=1)[0].prompt == "text"
