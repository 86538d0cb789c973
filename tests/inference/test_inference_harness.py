"""lm-evaluation-harness gives our models the scores that it gives transformers' with the same weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_run.errors import DataError, InputError
from megatron_run_inference import load
from tests.inference.harness_models import BOS, EOS, TEMPLATE, TEXT, TOKENIZERS, TURN, save_model
from tests.plugins.format.huggingface.family_cases import SPLIT

lm_eval: Any = pytest.importorskip("lm_eval")
pytestmark = [
    pytest.mark.nightly,  # the harness is not installed for `make test`
    pytest.mark.filterwarnings("ignore"),  # of the harness and what it needs
]

QUESTIONS = [
    ("the quick brown", ["fox", "dog sleeps", "lazy"], 0),
    ("jumps over the", ["fox", "lazy dog", "quick brown fox"], 1),
    ("a dog is not", ["a fox", "over", "the quick"], 0),
] * 5
#: Contexts and what follows them: none, with a space at the end or the begin token, and longer than the model reads.
PAIRS = [
    *(("the quick brown", answer) for answer in (" fox", " dog sleeps", "er", "\n\nlazy")),
    *(("", answer) for answer in ("the fox", " fox", f"{BOS}the", f"{EOS} the")),
    *((context, "a fox") for context in ("the quick ", "dog  ", f"{BOS}the quick ", f"{EOS}the ", "naïve 🎉 ")),
    *((" ".join([TEXT] * 3), answer) for answer in (" fox", " quick brown dog")),
]
ROLLING = ["", "fox", " fox", TEXT, " ".join([TEXT] * 4), f"{BOS}{TEXT}", f"{TEXT}{EOS} the", "naïve 🎉\n"]
CONTEXTS = ["the quick brown", "the lazy ", f"{BOS}the fox", "🎉", " ".join([TEXT] * 3)]
#: No stop is a part of a special token's name, in which the harness finds it, though no text has it.
SETTINGS: list[dict[str, Any]] = [
    {"until": [], "max_gen_toks": 9},
    {"until": ["o", "r"], "max_gen_toks": 9, "do_sample": False, "temperature": 0.0},
    {"until": [" ", "x"], "max_new_tokens": 8, "num_beams": 1},
    {"until": [TURN, "\n\n"], "max_tokens": 10},
    {"until": "h", "max_gen_toks": 7, "repetition_penalty": 1.4},
]
#: It knows no system, as Gemma's.
REFUSES = f"{{% if messages[0].role == 'system' %}}{{{{ raise_exception('no system') }}}}{{% endif %}}{TEMPLATE}"
TASKS = {
    "choose": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "roll": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "write": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{target}}"
generation_kwargs: {until: ["e"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


def requests(kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]


def both(folder: Path, batch: int = 3) -> tuple[Any, Any]:
    """Our model of the harness and its own, of the model in ``folder``."""
    from lm_eval.models.huggingface import HFLM

    from megatron_run_inference.harness import HarnessModel

    ours = HarnessModel(load(folder, device="cpu"), batch)
    return ours, HFLM(pretrained=str(folder), device="cpu", batch_size=1, dtype="float32")


def check(ours: Any, theirs: Any) -> None:
    """All answers of both: log-probabilities of continuations and of texts, and texts."""
    asked = requests("loglikelihood", PAIRS)
    for pair, found, expected in zip(PAIRS, ours.loglikelihood(asked), theirs.loglikelihood(asked), strict=True):
        assert found == (pytest.approx(expected[0], rel=1e-4), expected[1]), pair
    rolled = requests("loglikelihood_rolling", [(text,) for text in ROLLING])
    assert ours.loglikelihood_rolling(rolled) == pytest.approx(theirs.loglikelihood_rolling(rolled), rel=1e-4)
    wanted = [(context, settings) for settings in SETTINGS for context in CONTEXTS]
    found, expected = ours.generate_until(requests("generate_until", wanted)), []
    for each in wanted:
        expected += theirs.generate_until(requests("generate_until", [each]))
    for asked_for, one, other in zip(wanted, found, expected, strict=True):
        assert one == other, asked_for
    assert len(set(expected)) > 5, "the texts tell apart what is written"


@pytest.mark.parametrize("case", [*SPLIT, "gemma2, without windows", "phi3, long", "llama, yarn", "granite"])
def test_every_family_answers_as_transformers(case: str, tmp_path: Path) -> None:
    save_model(tmp_path, case, "a begin token and spaces")
    check(*both(tmp_path))


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_every_tokenizer_is_given_as_to_transformers(tokenizer: str, tmp_path: Path) -> None:
    save_model(tmp_path, "llama", tokenizer)
    check(*both(tmp_path))


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("tokenizer", ["a begin token and spaces", "nothing around"])
def test_texts_end_and_are_chosen_as_generation_config_says(tokenizer: str, batch: int, tmp_path: Path) -> None:
    save_model(tmp_path / "free", "llama", tokenizer)
    wanted = requests("generate_until", [(context, {"until": [], "max_gen_toks": 9}) for context in CONTEXTS])
    free = load(tmp_path / "free", device="cpu")
    written = [free.generate(context, max_new_tokens=9, temperature=0).pop().tokens for context in CONTEXTS[:3]]
    ends = sorted({tokens[4] for tokens in written})  # tokens that are written, none of them special
    save_model(
        tmp_path / "said", "llama", tokenizer, generation={"eos_token_id": [1, *ends], "repetition_penalty": 1.5}
    )
    ours, theirs = both(tmp_path / "said", batch)
    found = ours.generate_until(wanted)
    assert found == theirs.generate_until(wanted)
    assert found != both(tmp_path / "free", batch)[0].generate_until(wanted)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"num_beams": 3}, "num_beams"),
        ({"max_gen_toks": 16}, "texts of 16 tokens"),
        ({"do_sample": True}, "without a temperature"),
    ],
)
def test_settings_that_mean_something_else_here_are_refused(settings: dict[str, Any], why: str, tmp_path: Path) -> None:
    save_model(tmp_path, "llama", "a begin token")
    with pytest.raises(InputError, match=why):
        both(tmp_path)[0].generate_until(requests("generate_until", [("the", {"until": ["e"], **settings})]))


@pytest.mark.parametrize("pair", [("  ", " "), ("the", " fox" * 40)])
def test_what_the_harness_cannot_score_is_refused(pair: tuple[str, str], tmp_path: Path) -> None:
    save_model(tmp_path, "llama", "nothing around")
    ours, theirs = both(tmp_path)
    with pytest.raises(AssertionError):
        theirs.loglikelihood(requests("loglikelihood", [pair]))
    with pytest.raises(DataError, match="the harness cannot score"):
        ours.loglikelihood(requests("loglikelihood", [pair]))


@pytest.mark.parametrize("template", [TEMPLATE, REFUSES])
def test_conversations_are_rendered_as_by_transformers(template: str, tmp_path: Path) -> None:
    save_model(tmp_path, "llama", "a begin token", template=template)
    ours, theirs = both(tmp_path)
    asked = [{"role": "user", "content": "the quick? "}]
    turns = [{"role": "system", "content": "be kind"}, *asked, {"role": "assistant", "content": "a fox \n"}]
    for history in (asked, [*turns, *asked]):
        found, expected = (each.apply_chat_template(history) for each in (ours, theirs))
        assert found == expected
        assert ours.tok_encode(found) == theirs.tok_encode(expected)
    found, expected = (each.apply_chat_template(turns, add_generation_prompt=False) for each in (ours, theirs))
    assert found == expected
    assert ours.chat_template(True) == theirs.chat_template(True) == template


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_tasks_have_the_metrics_of_transformers(
    case: str, chat: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from megatron_run_inference.harness import find_tasks, run_harness

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    save_model(tmp_path / "model", case, "a begin token", length=64)
    rows = [
        {"question": text, "choices": [f" {each}" for each in choices], "answer": right, "text": TEXT, "target": " fox"}
        for text, choices, right in QUESTIONS
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    source = (
        f'dataset_path: json\ndataset_kwargs: {{data_files: {{test: "{tmp_path / "rows.jsonl"}"}}}}\ntest_split: test\n'
    )
    for name, rest in TASKS.items():
        (tmp_path / "tasks" / f"{name}.yaml").write_text(f"task: {name}\n{source}{rest}")
    manager = find_tasks(TASKS, str(tmp_path / "tasks"))
    ours = run_harness(load(tmp_path / "model", device="cpu"), manager, list(TASKS), batch=4, chat=chat)
    theirs = lm_eval.simple_evaluate(
        HFLM(pretrained=str(tmp_path / "model"), device="cpu", batch_size=1, dtype="float32"),
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tmp_path / "tasks")),
        bootstrap_iters=0,
        apply_chat_template=chat,
    )["results"]
    for task, metrics in theirs.items():
        numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
        assert numbers
        for name, value in numbers.items():
            assert ours[task][name] == pytest.approx(value, rel=1e-5), (task, name)
