"""The walk of a person: a folder of the Hub, fine-tuned on conversations, talked to, evaluated, and given back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_run import load
from megatron_run_cli.main import main
from tests.support.forked import forked_command
from tests.support.hub_folders import FAMILIES, SYSTEM, TOOLS, conversations, hub_folder

Output = pytest.CaptureFixture[str]
#: So many updates that answers are learned by heart, with their ends.
KEYS = (
    *("train.steps=60", "train.lr=1e-2", "train.global_batch_size=2", "train.sequence_length=320"),
    *("eval.interval=0", "eval.batches=1", "data.split=90,10,0", "run.threads=1", "run.device=cpu"),
)
TURNS = ("What is a fox?", "And a dog?", "Who are you?")
TEXT = "A fox is an animal. The dog is lazy, and it doesn't rain in Köln 🦊.\n"
LONGEST = 40


def answered(capsys: Output, *words: object) -> Any:
    """What a command has printed as JSON: the documents of its lines, or the one that it is."""
    assert main([*map(str, words), "--json"]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    return json.loads(out) if out.startswith("{\n") else [json.loads(line) for line in out.splitlines()]


class Theirs:
    """The export as transformers reads it."""

    def __init__(self, folder: Path) -> None:
        import transformers

        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def ids(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> list[int]:
        """The prompt for an answer."""
        made = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, **more)
        found: list[int] = made["input_ids"]
        return found

    def answer(self, ids: list[int]) -> list[int]:
        """The greedy answer, by the end tokens of the folder."""
        options = {"do_sample": False, "temperature": None, "top_p": None, "max_new_tokens": LONGEST}
        table = torch.tensor([ids])
        found: list[int] = self.model.generate(table, attention_mask=torch.ones_like(table), **options)[0].tolist()
        return found[len(ids) :]

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """Of each token but the first, given those before it."""
        with torch.no_grad():
            return scored(self.model(torch.tensor([ids])).logits, ids)


def scored(logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    return logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)


def check_talk(run: Path, theirs: Theirs, capsys: Output) -> None:
    """Each answer is transformers', prompt and end token included; the model has learned to end it."""
    options = ("--chat", "--temperature", 0, "--max-new-tokens", LONGEST)
    answers = answered(capsys, "generate", run, *options, "--system", SYSTEM, *TURNS)
    history = [{"role": "system", "content": SYSTEM}]
    for turn, answer in zip(TURNS, answers, strict=True):
        history.append({"role": "user", "content": turn})
        assert answer["prompt_tokens"] == theirs.ids(history)
        assert answer["tokens"] == theirs.answer(answer["prompt_tokens"])
        assert answer["text"] == theirs.tokenizer.decode(answer["tokens"], skip_special_tokens=True)
        history.append({"role": "assistant", "content": answer["text"]})
    assert answers[0]["finish"] == "stop"


def check_tools(run: Path, theirs: Theirs, line: Mapping[str, Any]) -> None:
    """A conversation with tools is rendered and answered as transformers does."""
    messages = line["messages"][:-1]
    assert line["tools"] == TOOLS
    answer = load(run).chat(messages, TOOLS, temperature=0, max_new_tokens=LONGEST)
    assert list(answer.prompt_tokens) == theirs.ids(messages, tools=TOOLS) != theirs.ids(messages)
    assert list(answer.tokens) == theirs.answer(list(answer.prompt_tokens))


def check_scores(run: Path, theirs: Theirs, folder: Path, capsys: Output) -> None:
    """Perplexity, the harness where it is installed, and the log-likelihoods of texts are the export's."""
    (folder / "text.txt").write_text(TEXT)
    ids = theirs.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    (found,) = answered(capsys, "eval", run, "--task", f"perplexity={folder / 'text.txt'}")["tasks"]
    assert found["tokens"] == len(ids) - 1
    assert found["loss"] == pytest.approx(-float(theirs.logprobs(ids).mean()), rel=1e-5)
    ours = load(run)
    for text in (TEXT, "Who are you?", "日本語 too"):
        ids = theirs.tokenizer(text)["input_ids"]
        assert ours.encode_prompt(text) == ids
        expected = float(theirs.logprobs(ids).double().sum())
        assert float(scored(ours([ids]), ids).double().sum()) == pytest.approx(expected, rel=1e-5)
    if find_spec("lm_eval") is not None:
        check_harness(run, theirs, folder, capsys)


def check_harness(run: Path, theirs: Theirs, folder: Path, capsys: Output) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    tasks = folder / "tasks"
    tasks.mkdir()
    (tasks / "texts.json").write_text(json.dumps([{"text": TEXT}, {"text": TURNS[0]}]))
    (tasks / "roll.yaml").write_text(
        f"task: roll\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tasks / 'texts.json'}}}}}\n"
        'test_split: test\noutput_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]\n"
    )
    found = answered(capsys, "eval", "harness", run, "--tasks", "roll", "--include", tasks)["tasks"]["roll"]
    model = HFLM(pretrained=theirs.model, tokenizer=theirs.tokenizer, batch_size=1)
    manager = TaskManager(include_path=str(tasks))
    expected = simple_evaluate(model, tasks=["roll"], task_manager=manager, bootstrap_iters=0)["results"]["roll"]
    for metric in ("word_perplexity,none", "bits_per_byte,none"):
        assert found[metric] == pytest.approx(expected[metric], rel=1e-4), metric


def check_folder(folder: Path, export: Path, theirs: Theirs) -> None:
    """What the folder said beside its weights is said by the export."""
    before, now = (json.loads((each / "generation_config.json").read_text()) for each in (folder, export))
    assert {key: now.get(key) for key in before if key != "transformers_version"} == {
        key: value for key, value in before.items() if key != "transformers_version"
    }
    assert len(before["eos_token_id"]) > 1
    family = FAMILIES[folder.name]
    assert theirs.tokenizer.chat_template == family.template
    given = {key: text for key, text in family.special.items() if text is not None}
    assert dict(theirs.tokenizer.special_tokens_map) == given


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.parametrize(
    "family", [name if name == "llama" else pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES]
)
def test_a_folder_of_the_hub_is_tuned_talked_to_scored_and_given_back(
    family: str, tmp_path: Path, capsys: Output
) -> None:
    folder = hub_folder(family, tmp_path / family)
    lines = conversations(family)
    (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    keys = (word for key in (*KEYS, "run.folder=run") for word in ("--set", key))
    done = forked_command(("finetune", family, "--data", "chats.jsonl", "--plugin", "data=instruct", *keys), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "lost their end" not in done.stdout
    run, export = tmp_path / "run", tmp_path / "export"
    assert main(["export", str(run), str(export), "--to", "huggingface"]) == 0
    capsys.readouterr()
    theirs = Theirs(export)
    check_talk(run, theirs, capsys)
    check_talk(export, theirs, capsys)
    check_tools(run, theirs, lines[-1])
    check_scores(run, theirs, tmp_path, capsys)
    check_folder(folder, export, theirs)
