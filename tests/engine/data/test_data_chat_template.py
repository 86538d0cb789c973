"""Chat templates: prompts with the ids of transformers, where answers end, and what is learned of conversations."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_run.contracts import DataSource
from megatron_run.errors import DataError, InputError
from megatron_run_data_instruct import InstructOptions
from megatron_run_data_instruct import megatron_run_create_data as instruct
from megatron_run_engine.builtin.data.text import TextOptions
from megatron_run_engine.builtin.data.text import megatron_run_create_data as text
from megatron_run_engine.data.chat_template.chat_messages import NoConversation
from megatron_run_engine.data.chat_template.prompt import AnswerPrompt, ChatPrompts
from megatron_run_engine.data.chat_template.renderer import compiled, rendered, roles_of
from megatron_run_engine.data.chat_template.template import PLAIN, ChatTemplate
from tests.support.hub_folders import FAMILIES, TOOLS, conversations, hub_tokenizer

ASKED = [{"role": "user", "content": "a fox?"}]
SAID = {"role": "assistant", "content": "It is."}


class Here:
    """A :class:`Renderer` without a process: what bounds one is tried elsewhere."""

    def __init__(self, source: str, date: str | None = None) -> None:
        template = compiled(source, date)
        self.render: Callable[[Mapping[str, Any]], str] = partial(rendered, template)
        self.roles = frozenset(roles_of(template.environment.parse(source)))


@pytest.fixture(autouse=True)
def _renders_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_run_engine.data.chat_template.template.Renderer", Here)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of a family, with its template."""
    folder = tmp_path_factory.mktemp("tokenizers") / str(request.param)
    hub_tokenizer(request.param).save_pretrained(folder)
    return folder


def data_of(tokenizer: Path | str, **options: object) -> DataSource:
    """The data of a model that was imported, or with options the one that it was fine-tuned on."""
    if not options:
        return text(TextOptions(tokenizer=str(tokenizer)))
    return instruct(InstructOptions.model_validate({"paths": "none.jsonl", "tokenizer": str(tokenizer), **options}))


def prompt(data: DataSource, messages: Sequence[Any] = ASKED, **more: Any) -> AnswerPrompt:
    return ChatPrompts(data, "the model").of(messages, **more)


def test_prompts_are_those_of_transformers_with_tools_and_without(folder: Path) -> None:
    """Of a conversation at each of its turns; the date of the template is the day's."""
    transformers: Any = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    both = [ChatPrompts(data_of(folder), folder), ChatPrompts(data_of(folder, split="1,0,0"), folder)]
    compared = 0
    for line in conversations(folder.name)[:7]:
        for place, message in enumerate(line["messages"]):
            if message["role"] != "assistant":
                continue
            messages, tools = line["messages"][:place], line.get("tools")
            expected = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=True)
            assert [each.of(messages, tools).tokens for each in both] == [expected["input_ids"]] * 2
            compared += 1
    assert compared >= 13


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_an_answer_ends_at_the_token_that_ends_its_turn(folder: Path, tools: Sequence[Any] | None) -> None:
    data = data_of(folder)
    end = {"llama": "<|eot_id|>", "gemma": "<end_of_turn>", "qwen": "<|im_end|>", "phi": "<|end|>"}[folder.name]
    found = prompt(data, tools=tools)
    assert (found.ends, found.stops) == (frozenset(data.encode(end) or ()), ())
    assert prompt(data, [*ASKED, SAID, *ASKED]).ends == found.ends


def test_without_a_special_token_an_answer_ends_where_the_next_turn_begins() -> None:
    data = data_of("bytes", template="auto")
    found = prompt(data)
    assert bytes(found.tokens).decode() == "User: a fox?\nAssistant: "
    assert (found.ends, found.stops) == (frozenset({256}), ("\nUser:",))
    for template, stops in (
        ("{% for m in messages %}{{ m.content }}<|end|>\n[{{ m.role }}]{% endfor %}", ("<|end|>",)),
        ("{% for m in messages %}{{ m.content }}\n\n### {{ m.role }}:\n{% endfor %}", ("\n\n### assistant:",)),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", ()),
        ("{{ messages[-1].content }}", ()),
        ("{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}", ()),
    ):
        assert (prompt(data, template=template).ends, prompt(data, template=template).stops) == (frozenset(), stops)


def test_a_space_alone_ends_no_answer(tmp_path: Path) -> None:
    """Its token has no text at the start of one, where tokenizers mark spaces."""
    hub_tokenizer("gemma").save_pretrained(tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    state["decoder"]["decoders"].append({"type": "Strip", "content": " ", "start": 1, "stop": 0})  # as Llama 2's
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    data = data_of(tmp_path)
    template = (
        "{% for m in messages %} {{ m.content }} {% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    assert data.decode(data.encode(" ") or ()) == ""
    assert prompt(data, template=template).ends == frozenset({data.special_tokens["eos"][1]})


def test_the_date_is_the_one_that_is_given(tmp_path: Path) -> None:
    hub_tokenizer("llama").save_pretrained(tmp_path)
    data = data_of(tmp_path)
    assert "Today Date: 03 Feb 2001" in str(data.decode(prompt(data, date="2001-02-03").tokens))
    with pytest.raises(InputError, match="someday"):
        prompt(data, date="someday")


def test_marks_of_what_is_learned_are_in_no_prompt() -> None:
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}"
    assert bytes(prompt(data_of("bytes"), [*ASKED, SAID], template=template).tokens) == b"a fox?|It is.|"


def test_the_model_answers_by_the_template_that_it_has_learned(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    data = data_of("bytes", template=str(tmp_path / "own.jinja"))
    assert bytes(prompt(data).tokens) == b"<a fox?>"
    assert data_of("bytes", template="auto").chat_template() == PLAIN


@pytest.mark.parametrize(
    ("messages", "more", "why"),
    [
        ([], {}, "must be a list of one or more"),
        ([{"role": "user"}], {}, "content of message 0 is missing"),
        ([{"role": "user", "content": "\ufdd0"}], {}, "holds U\\+FDD0"),
        ([{"role": "narrator", "content": "a"}], {}, "role of message 0 is 'narrator'; roles are .*tool"),
        (ASKED, {"tools": ["weather"]}, "tools must be a list of objects"),
        (ASKED, {"template": "{{ raise_exception('only two turns') }}"}, "only two turns"),
    ],
)
def test_what_cannot_be_answered_is_one_line(messages: Sequence[Any], more: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=f"the conversation cannot be answered: .*{why}"):
        prompt(data_of("bytes"), messages, **{"template": PLAIN, **more})


def test_a_role_that_the_template_names_is_one() -> None:
    told = "{% for m in messages %}{% if m.role == 'narrator' %}({{ m.content }}){% endif %}{% endfor %}"
    assert ChatTemplate(told, "t", {}).prompt([{"role": "narrator", "content": "a"}]) == "(a)"


ALL = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    "naming",
    [
        "{% if messages[0]['role'] == 'narrator' %}{% endif %}",
        "{% if 'narrator' == messages[0].role %}{% endif %}",
        "{% if messages[0]['role'] not in ['user', 'narrator'] %}{% endif %}",
        "{% set known = ('user', 'narrator') %}{% if messages[0].role in known %}{% endif %}",
        "{% set who = messages[0].get('role') | lower %}{% set own = who %}{% if own == 'narrator' %}{% endif %}",
        "{% set role = 'model' if messages[0].role == 'narrator' else messages[0].role %}",
        "{{ {'narrator': ''}[messages[0].role] }}",
        "{% set short = {'user': 'u', 'narrator': 'n'} %}{{ short.get(messages[0].role) }}",
        "{% if messages[0].role.startswith('narrator') %}{% endif %}",
        "{% if messages[0].role is eq 'narrator' %}{% endif %}",
        "{{ messages | selectattr('role', 'equalto', 'narrator') | list | length }}",
    ],
)
def test_each_way_to_tell_a_role_apart_names_it(naming: str) -> None:
    template = ChatTemplate(naming + ALL, "t", {})
    assert template.prompt([{"role": "narrator", "content": "a"}]).endswith("<narrator>a")
    with pytest.raises(NoConversation, match="did you mean 'narrator'"):
        template.prompt([{"role": "narator", "content": "a"}])


@pytest.mark.parametrize("word", ["role", "content", "equalto", "lower", "im_start"])
def test_another_word_of_a_template_is_no_role(word: str) -> None:
    other = (
        "{% set sign = 'im_start' %}{% if 'content' in messages[0] and messages[0]['content'] == 'lower' %}{% endif %}"
    )
    chosen = "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"
    with pytest.raises(NoConversation, match=f"role of message 0 is '{word}'"):
        ChatTemplate(other + chosen + ALL, "t", {}).prompt([{"role": word, "content": "a"}])


def test_without_a_template_it_says_what_to_type() -> None:
    with pytest.raises(DataError, match=r"the model has no chat template: .*--template FILE.*without --chat"):
        prompt(data_of("bytes"))


def test_a_token_that_ends_the_conversation_hides_no_earlier_answer() -> None:
    """Phi-3's template writes one after the last turn alone."""
    tokens = {"eos_token": "<|endoftext|>"}
    template = ChatTemplate(FAMILIES["phi"].template, "phi", tokens)
    chat = [*ASKED, SAID, *ASKED, {"role": "assistant", "content": "No."}]
    rendered, spans = template.render(chat)
    assert [rendered[start:stop] for start, stop in spans] == ["It is.<|end|>", "No.<|end|><|endoftext|>"]
    assert json.dumps(rendered).count("endoftext") == 1
