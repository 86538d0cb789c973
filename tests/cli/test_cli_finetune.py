"""From a Hugging Face folder to a fine-tuned model that transformers loads with its tokenizer, in two commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch

from megatron_run import load
from megatron_run.errors import DataError, ExitCode
from megatron_run.planning import load_config
from megatron_run_cli.main import main
from megatron_run_engine import train
from megatron_run_engine.checkpoint.step_folder import Checkpoints
from megatron_run_engine.training.state.init_from import check_source, unloaded_weights
from tests.support.forked import forked_command

Output = pytest.CaptureFixture[str]
SMALL = ("train.steps=2", "train.global_batch_size=1", "eval.batches=1", "run.threads=1", "data.split=50,25,25")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return folder


@pytest.fixture(scope="module")
def model(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random GPT-2 of transformers' with a tokenizer of its own."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("hf") / "model"
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=5, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(folder)
    write_words(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def write_words(path: Path) -> Path:
    """A tokenizer of three words."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "fox": 1, "dog": 2, "[UNK]": 3}, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(path))
    return path


def run(*words: object) -> int:
    return main([str(word) for word in words])


def train_forked(*words: object) -> None:
    """A training that succeeds, in a process that is forked: its ranks import nothing anew."""
    done = forked_command([str(word) for word in words], Path.cwd())
    assert done.returncode == 0, done.stderr


def sets(*keys: str) -> list[str]:
    return [word for key in keys for word in ("--set", key)]


@pytest.mark.multiproc
def test_a_model_goes_there_and_back_with_its_tokenizer(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("finetune", str(model), "--data", str(texts / "*.txt"), *sets("run.folder=tuned", *SMALL))
    done = forked_command(words, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "with train: lr=2e-05" in done.stderr
    assert "weights of step 0 of" in done.stdout
    assert (tmp_path / "tuned" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    about = Checkpoints(tmp_path / "tuned" / "checkpoints").manifest(2).about
    assert about.tokenizer is not None
    assert run("export", "tuned", "out", "--to", "huggingface") == 0
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    again = ("finetune", "tuned", "--data", str(texts), *sets("run.folder=more", *SMALL))
    assert forked_command(again, tmp_path).returncode == 0
    assert run(*words, "--quiet") == 0  # finished: what was imported is there


def test_conversations_need_a_file_and_the_plugin_that_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Output
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text('{"prompt": "fox", "response": "dog"}\n')
    assert run("finetune", "chat", "--plugin", "data=instruct") == 2
    assert "add --data" in capfd.readouterr().err
    assert run("finetune", "chat", "--data", "chats.jsonl") == ExitCode.INPUT
    assert "add --plugin data=instruct" in capfd.readouterr().err


@pytest.mark.parametrize("more", [(), ("--plugin", "data=instruct")])
def test_a_misspelt_file_is_told_before_a_model_is_imported(
    more: tuple[str, ...], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Output
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text("{}")
    assert run("finetune", str(model), "--data", "chats.jsnl", *more) == 5
    assert "data file chats.jsnl does not exist (from --data); did you mean 'chats.jsonl'?" in capfd.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.nightly  # four processes that import torch; test_formats_convert has the template, instruct's own the data
def test_a_model_is_tuned_on_conversations_with_the_template_beside_its_tokenizer(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Output
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "chat")
    template = "{% for m in messages %}{{ m.role == 'user' and 'the' or 'dog' }} {{ m.content }}\n{% endfor %}"
    Path("chat/chat_template.jinja").write_text(template)
    chats = [{"prompt": "fox " * (n % 5 + 1), "response": "dog"} for n in range(30)]
    Path("chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    words = ("--plugin", "data=instruct", *sets(*SMALL, "eval.sample=4"))
    assert run("finetune", "chat", "--data", "chats.jsonl", *words, *sets("run.folder=tuned")) == 0
    said = capfd.readouterr()
    assert " conversations in " in said.out
    assert "lines of Role" not in said.out
    assert Path("tuned/chat_template.jinja").read_text() == template
    assert run("finetune", "tuned", *words, *sets("data.paths=chats.jsonl", "run.folder=more")) == 0
    assert "lines of Role" not in capfd.readouterr().out


def test_an_import_names_its_weights_and_its_tokenizer(model: Path, texts: Path, tmp_path: Path) -> None:
    home = tmp_path / "ours"
    assert run("import", model, home) == 0
    given = {"train.steps": 1, "train.global_batch_size": 1, "data.paths": [str(texts)]}
    loaded = load_config(home / "config.yaml", sets=given)
    assert loaded.config.run.init_from == home
    assert loaded.config.data.options["tokenizer"] == str(home / "tokenizer.json")
    check_source(loaded)
    assert not unloaded_weights(loaded)
    assert f"run.init_from={home}" in unloaded_weights(
        load_config(home / "config.yaml", sets={**given, "run.init_from": None})
    )


def test_data_of_another_vocabulary_is_refused_with_both_names(model: Path, texts: Path, tmp_path: Path) -> None:
    home, other = tmp_path / "ours", tmp_path / "other.json"
    assert run("import", model, home) == 0
    given = {"train.steps": 1, "train.global_batch_size": 1, "data.paths": [str(texts)]}
    content = json.loads((model / "tokenizer.json").read_text())
    other.write_text(json.dumps(content, indent=4))  # the same vocabulary in another file
    check_source(load_config(home / "config.yaml", sets={**given, "data.tokenizer": str(other)}))
    content["model"]["vocab"] |= {"fox": 2, "dog": 1}
    other.write_text(json.dumps(content))
    for tokenizer in (str(other), "bytes"):
        run_ = load_config(home / "config.yaml", sets={**given, "data.tokenizer": tokenizer, "model.vocab_size": 5})
        with pytest.raises(DataError) as error:
            check_source(run_)
        assert f"they were trained with {model}, " in str(error.value)
        assert tokenizer in str(error.value)


def test_a_model_without_a_tokenizer_needs_one(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "bare" / name).write_bytes((model / name).read_bytes())
    assert run("finetune", "bare", "--data", texts) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err


def test_a_model_of_bytes_is_tuned_from_its_run_and_from_its_export(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    from transformers import AutoTokenizer

    monkeypatch.chdir(tmp_path)
    small = {"model.num_layers": 1, "train.sequence_length": 16, "train.steps": 1, "train.lr_warmup": 0}
    keys = {**small, "data.use": "text", "data.paths": str(texts), "observer.use": [], "eval.interval": 0}
    train(load_config("preset:tiny", sets={**keys, "run.folder": "mine", "run.threads": 1, "data.split": "90,5,5"}))
    assert run("finetune", "mine", "--data", texts, "--dry-run", *sets(*SMALL)) == 0
    assert "tokenizer" not in capsys.readouterr().err
    assert run("export", "mine", "out", "--to", "huggingface") == 0
    text = "naïve  text\n"
    assert AutoTokenizer.from_pretrained("out")(text)["input_ids"] == list(text.encode())
    assert run("finetune", "out", "--data", texts, "--dry-run", *sets(*SMALL)) == 0
    from_mine = {**keys, "run.init_from": "mine"}
    check_source(load_config("preset:tiny", sets={**from_mine, "data.tokenizer": "out/tokenizer.json"}))
    other = write_words(tmp_path / "other.json")
    with pytest.raises(DataError, match=f"they were trained with bytes, the data has {other}"):
        check_source(
            load_config("preset:tiny", sets={**from_mine, "data.tokenizer": str(other), "model.vocab_size": 257})
        )


@pytest.mark.multiproc
def test_what_a_model_came_with_comes_out_of_its_fine_tuning(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Output
) -> None:
    """Every end token, how texts are sampled, the longest sequence, special tokens: whatever the samples' length."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    ends = {"bos_token_id": 4, "eos_token_id": 0, "pad_token_id": 3}
    config = LlamaConfig(vocab_size=5, max_position_embeddings=64, dtype="bfloat16", **sizes, **ends)
    LlamaForCausalLM(config).bfloat16().save_pretrained("hf")
    write_words(Path("hf/tokenizer.json"))
    said = json.loads(Path("hf/generation_config.json").read_text()) | {"eos_token_id": [0, 2], "top_k": 7}
    Path("hf/generation_config.json").write_text(json.dumps(said))
    Path("hf/special_tokens_map.json").write_text('{"eos_token": "the"}')
    tuning = ("--data", texts, *sets(*SMALL, "train.sequence_length=16"))
    train_forked("finetune", "hf", *tuning, *sets("run.folder=tuned"))
    shutil.rmtree("runs")  # a run needs no more what it began with
    train_forked("finetune", "tuned", *tuning, *sets("run.folder=more"))
    shutil.copytree("more", "elsewhere")
    assert run("export", "elsewhere", "out", "--to", "huggingface") == 0
    ours, told = (json.loads(Path(folder, "generation_config.json").read_text()) for folder in ("out", "hf"))
    assert ours == told
    read, given = (AutoTokenizer.from_pretrained(folder) for folder in ("out", "hf"))
    assert read.special_tokens_map == given.special_tokens_map
    assert read.eos_token == "the"
    assert read.get_vocab() == given.get_vocab()
    assert read("the fox, the dog")["input_ids"] == given("the fox, the dog")["input_ids"]
    before, after = (json.loads(Path(folder, "config.json").read_text()) for folder in ("hf", "out"))
    for key in ("max_position_embeddings", *ends):
        assert after[key] == before[key], key
    assert after["dtype"] == "float32"  # learned values need more than bf16 has
    assert load("elsewhere").positions == 64
    tokens = torch.tensor([[0, 1, 2] * 10])
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained("out").eval()(tokens).logits
    torch.testing.assert_close(load("elsewhere")(tokens), theirs, rtol=0, atol=1e-5)
    capfd.readouterr()
    assert run("generate", "elsewhere", "the fox " * 20, "--max-new-tokens", "2") == 0
    assert "too long" not in capfd.readouterr().err


@pytest.mark.multiproc
def test_the_data_of_another_vocabulary_do_not_hand_on_what_ids_meant(
    texts: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("import", model, "ours") == 0
    other = write_words(tmp_path / "other.json")
    content = json.loads(other.read_text())
    content["model"]["vocab"] |= {"fox": 2, "dog": 1}
    other.write_text(json.dumps(content))
    words = ("ours/config.yaml", "--allow-change", "data.tokenizer")
    keys = sets(*SMALL, "run.folder=r", f"data.paths={texts}", f"data.tokenizer={other}", "train.sequence_length=16")
    train_forked(*words, *keys)
    assert Path("ours/source/generation_config.json").is_file()
    assert not Path("r/source").exists()
