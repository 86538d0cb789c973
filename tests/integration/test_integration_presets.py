"""Every preset resolves, counts its parameters as its source prints them, and trains by the recipe that it names."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import tokenizers

from megatron_run.config.presets import presets
from megatron_run.planning import ResolvedRun, load_config
from megatron_run_cli.main import main
from megatron_run_cli.reports import dry_run
from megatron_run_cli.reports.dry_run import dry_run_json, dry_run_text
from megatron_run_engine.estimate.model_size import model_size
from tests.plugins.model.bert.test_model_bert_presets import TABLE
from tests.support.forked import forked_command

#: The recipe of the Megatron-LM paper (Shoeybi et al. 2019, section 4.2), as keys of the configuration.
RECIPE = {
    "precision": "fp16",
    "lr": 1.5e-4,
    "min_lr": 1e-5,
    "lr_shape": "cosine",
    "weight_decay": 0.01,
    "clip_norm": 1.0,
    "sequence_length": 1024,
}


@dataclass(frozen=True)
class Row:
    """A row of a table in a paper. ``printed`` is its parameter count, ``unit`` the size of its last digit.

    ``ranks`` are all of its GPUs, of which ``tensor`` share a model.
    """

    layers: int
    hidden: int
    heads: int
    printed: float
    unit: float
    tensor: int
    ranks: int


#: Tables 1 and 2 of the Megatron-LM paper. A row of table 1 counts its model-parallel GPUs, ``64way`` all of them.
PAPER = {
    "scaling-1.2b": Row(40, 1536, 16, 1.2e9, 1e8, 1, 1),
    "scaling-2.5b": Row(54, 1920, 20, 2.5e9, 1e8, 2, 2),
    "scaling-4.2b": Row(64, 2304, 24, 4.2e9, 1e8, 4, 4),
    "scaling-8.3b": Row(72, 3072, 32, 8.3e9, 1e8, 8, 8),
    "gpt2-355m": Row(24, 1024, 16, 355e6, 1e6, 1, 64),
    "gpt2-2.5b": Row(54, 1920, 20, 2.5e9, 1e8, 2, 128),
    "gpt2-8.3b": Row(72, 3072, 24, 8.3e9, 1e8, 8, 512),
}
SCALING = [name for name in PAPER if name.startswith("scaling")]
TRAINING = [name for name in PAPER if name.startswith("gpt2")]
#: The one whose dry run is read.
TOLD = "gpt2-355m"
#: The other presets with their counts of parameters and ranks.
OTHERS = {
    "gpt2-small": (124_439_808, 1),
    "one-gpu": (162_148_608, 1),
    "eight-gpus": (1_338_415_104, 8),
    "mixture": (1_511_245_824, 8),
    "laptop": (825_088, 1),
    "tiny": (56_000, 1),
}
#: Presets that only change others.
CHANGES = {"scaling-64way", "finetune"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the text, the tokenizer and the prepared corpus that presets name."""
    folder = tmp_path_factory.mktemp("presets")
    for name in ("text", "gpt2", "data"):
        (folder / name).mkdir()
    (folder / "text" / "fox.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 5000)
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(["the quick brown fox"], vocab_size=260, special_tokens=["<|endoftext|>"])
    made.save_model(str(folder / "gpt2"))
    places = ["--out", folder / "data" / "gpt2", "--tokenizer", folder / "gpt2"]
    words = ["data", "prepare", folder / "text", *places, "--separator", "\n", "--workers", 1]
    assert main([str(word) for word in words]) == 0
    return folder


@pytest.fixture(autouse=True)
def inputs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Presets name files below the working folder."""
    monkeypatch.chdir(home)


def layers_hidden_heads(run: ResolvedRun) -> tuple[int, int, int]:
    options = run.one("model").options
    return options.num_layers, options.hidden_size, options.num_heads  # type: ignore[union-attr]  # gpt's


def test_every_preset_is_in_these_tables() -> None:
    assert set(presets()) == PAPER.keys() | OTHERS.keys() | CHANGES | TABLE.keys()
    assert all(len(line) > 20 for line in presets().values())


@pytest.mark.parametrize("name", PAPER)
def test_a_model_of_the_megatron_paper_has_its_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = PAPER[name]
    run = load_config(f"preset:{name}")
    assert layers_hidden_heads(run) == (row.layers, row.hidden, row.heads)
    assert (run.sizes.tensor, run.sizes.world) == (row.tensor, row.ranks)

    h, t = row.hidden, row.tensor
    split, whole = 12 * h**2 + 7 * h, 6 * h  # of a layer: matrices and biases of columns; norms and biases of rows
    ends = 1024 * h + 2 * h  # positions and the last norm
    size = model_size(run)
    assert size.parameters == row.layers * (split + whole) + 50257 * h + ends
    assert round(size.parameters / row.unit) == round(row.printed / row.unit)

    padded = -(-50257 // (128 * t)) * 128 * t
    padding = (padded - 50257) * h if t == 1 else 0  # the first rank's rows lie before any padding
    first = row.layers * (split // t + whole) + min(padded // t, 50257) * h + ends
    assert size.stages[0][:2] == (first, padding)
    if name != TOLD:
        return
    counted = dry_run._step_memory(load_config(f"preset:{name}", sets={"model.num_layers": 2}))  # nobody reads it here
    monkeypatch.setattr(dry_run, "_step_memory", lambda *_: counted)
    told = dry_run_text(run)
    assert f"parameters of the model: {size.parameters:,}\n" in told
    assert f"vocabulary: 50,257, padded to {padded:,}\n" in told
    held = f"{first:,} on stage 0" + (f" (and {padding:,} of padding)" if padding else "")
    assert f"parameters of a rank: {held}\n" in told
    printed = dry_run_json(run)
    keys = ("parameters", "parameters_by_stage", "padding_by_stage", "padded_vocab")
    assert [printed[key] for key in keys] == [size.parameters, [first], [padding], padded]


@pytest.mark.parametrize("name", [*PAPER, "gpt2-small"])
def test_the_paper_s_recipe_is_in_its_presets(name: str) -> None:
    run = load_config(f"preset:{name}")
    train, model = run.config.train, run.one("model").options
    assert {key: getattr(train, key) for key in RECIPE} == RECIPE
    assert (model.dropout, model.init_std) == (0.1, 0.02)  # type: ignore[union-attr]  # gpt's
    assert run.one("scaler").name == "dynamic"
    assert run.one("optimizer").name == "adamw"
    assert train.recompute == ("none" if name == "gpt2-small" else "full")


@pytest.mark.parametrize("name", [*TRAINING, "gpt2-small"])
def test_language_models_of_the_paper_train_for_300k_steps_of_512(name: str) -> None:
    run = load_config(f"preset:{name}")
    train = run.config.train
    assert (train.steps, train.global_batch_size, str(train.lr_warmup)) == (300_000, 512, "3000")


@pytest.mark.parametrize("name", SCALING)
def test_table_1_has_a_batch_of_8_and_64_copies_one_of_512(name: str) -> None:
    alone = load_config(f"preset:{name}")
    assert (alone.sizes.data, alone.config.train.global_batch_size) == (1, 8)
    copies = load_config(f"preset:{name}", "preset:scaling-64way")
    assert (copies.sizes.data, copies.sizes.world) == (64, 64 * PAPER[name].ranks)
    assert copies.config.train.global_batch_size == 512


@pytest.mark.parametrize("name", OTHERS)
def test_another_preset_has_the_size_that_it_tells(name: str) -> None:
    run = load_config(f"preset:{name}")
    assert (model_size(run).parameters, run.sizes.world) == OTHERS[name]


def test_a_mixture_tells_how_many_parameters_meet_a_token() -> None:
    told = dry_run_json(load_config("preset:mixture"))["mixture"]
    assert f"{told['parameters_per_token'] / 1e6:.0f} of 1,511 million" in presets()["mixture"]


def test_the_fine_tuning_preset_follows_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"prompt": f"ask {n}", "response": f"say {n}"}) + "\n" for n in range(99)))
    small = ("train.steps=1", "train.sequence_length=32", f"run.folder={tmp_path / 'base'}", "eval.interval=0")
    text = ["--plugin", "data=text,paths=text"]
    done = forked_command(("preset:tiny", *(word for key in small for word in ("--set", key)), *text), Path())
    assert done.returncode == 0, done.stderr
    told = ["--data", str(chats), "--dry-run", "--json"]
    assert main(["finetune", str(tmp_path / "base"), "preset:finetune", *told]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["parameters"] == 4 * (12 * 32**2 + 13 * 32) + (257 + 32 + 2) * 32  # layers; bytes, positions, norm
    assert printed["plugins"]["data"][0]["name"] == "instruct"
    assert (printed["config"]["train"]["steps"], printed["plans"][0]["microbatches"]) == (1000, 64 // 4)
