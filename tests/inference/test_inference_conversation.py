"""A talk with a model: each answer is to all that was said, as far as the model reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from megatron_run.errors import InputError
from megatron_run_inference import LoadedModel, Writing, load
from megatron_run_inference.conversation import Conversation
from tests.support.small_models import GPT2, LENGTH, saved_network

#: A byte is a token; a turn is its text and a bar, an answer ends at a bar.
TEMPLATE = "{% for m in messages %}{{ m.content }}|{% endfor %}"
#: Answers of two tokens, or one more where it ends them; the end of a text is no answer's first token.
WRITING = Writing(max_new_tokens=2, temperature=1.0, top_k=20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    folder = tmp_path_factory.mktemp("conversation") / "run"
    saved_network(folder, {**GPT2, "vocab_size": 257, "init_std": 0.2})
    loaded = load(folder, sets={"data.use": "text"})
    yield loaded
    vars(loaded).pop("_prompts")  # a template has a process, which would end with the model


def options(**more: Any) -> dict[str, Any]:
    return {"max_new_tokens": 2, "temperature": 1.0, "top_k": 20, **more}


def test_an_answer_is_what_the_model_writes_after_its_prompt(model: LoadedModel) -> None:
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    answer = model.chat(messages, template=TEMPLATE, **options())
    (expected,) = model.generate([list(b"ab|c|")], stop="|", **options())
    assert answer == expected
    assert model.chat_tokens(messages, template=TEMPLATE) == list(b"ab|c|")
    shown: list[str] = []
    assert model.chat(messages, template=TEMPLATE, show=shown.append, **options()) == expected
    assert "".join(shown) == expected.text
    with pytest.raises(InputError, match="num=2: a conversation has one answer"):
        model.chat(messages, template=TEMPLATE, num=2)


def test_the_turn_of_an_answer_ends_it_unless_it_is_to_go_on(model: LoadedModel) -> None:
    """A template that writes what the model is about to write makes that the end of its turn."""
    messages = [{"role": "user", "content": "ab"}]
    (free,) = model.generate([list(b"ab")], max_new_tokens=8, temperature=0)
    assert free.text
    mark = next(letter for letter in free.text if letter.isprintable() and not letter.isspace() and letter != "\ufffd")
    after = "{% if not loop.last %}" + f"{{{{ {mark!r} }}}}" + "{% endif %}"
    template = "{% for m in messages %}{{ m.content }}" + after + "{% endfor %}"
    ended = model.chat(messages, template=template, max_new_tokens=8, temperature=0)
    assert (ended.text, ended.finish) == (free.text.partition(mark)[0], "stop")
    assert model.chat(messages, template=template, max_new_tokens=8, temperature=0, past_end=True) == free


def test_an_answer_ends_where_the_positions_do(model: LoadedModel) -> None:
    asked = [{"role": "user", "content": "a" * (LENGTH - 3)}]
    answer = model.chat(asked, template=TEMPLATE, max_new_tokens=100, temperature=0, past_end=True)
    assert (len(answer.prompt_tokens), len(answer.tokens), answer.finish) == (LENGTH - 2, 3, "length")
    talk = Conversation(model, Writing(max_new_tokens=100, temperature=0, past_end=True), template=TEMPLATE)
    assert talk.limit_of(answer) == f"the model's {LENGTH} positions, after 3 tokens"
    with pytest.raises(InputError, match="a prompt is too long"):
        model.chat([{"role": "user", "content": "a" * LENGTH}], template=TEMPLATE)


def test_each_answer_is_to_all_that_was_said(model: LoadedModel) -> None:
    talk = Conversation(model, WRITING, "s", TEMPLATE)
    first, second = talk.ask("a"), talk.ask("b")
    assert bytes(first.prompt_tokens) == b"s|a|"
    assert bytes(second.prompt_tokens) == b"s|a|" + str(first.text).encode() + b"|b|"
    talk.forget()
    assert talk.ask("a") == first


def test_the_oldest_turns_are_left_out_with_a_notice_where_they_leave_no_room(model: LoadedModel) -> None:
    told: list[str] = []
    talk = Conversation(model, WRITING, "s", TEMPLATE, told.append)
    first = talk.ask("aaaa")
    kept = b"s|bbbbbbbb|"
    assert len(b"s|aaaa|" + str(first.text).encode() + b"|bbbbbbbb|") > LENGTH - 2
    second = talk.ask("bbbbbbbb")
    assert bytes(second.prompt_tokens) == kept
    assert told == [f"the 2 oldest of 3 messages are left out from here on: the model reads {LENGTH} tokens"]


def test_what_cannot_be_answered_is_no_part_of_the_talk(model: LoadedModel) -> None:
    told: list[str] = []
    talk = Conversation(model, WRITING, None, TEMPLATE, told.append)
    first = talk.ask("a")
    with pytest.raises(InputError, match="a prompt is too long"):
        talk.ask("b" * LENGTH)
    told.clear()
    assert bytes(talk.ask("c").prompt_tokens) == b"a|" + str(first.text).encode() + b"|c|"
    assert not told
