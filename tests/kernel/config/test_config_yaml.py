from __future__ import annotations

import json
import time

import pytest
from ruamel.yaml import YAML

from megatron_run.config.yaml import MAX_BYTES, bare, parse
from megatron_run.errors import InputError, RunError


def data(text: str, name: str = "run.yaml") -> object:
    return {key: bare(node) for key, node in parse(text, name).items()}


def refusal(text: str, name: str = "run.yaml") -> str:
    with pytest.raises(InputError) as caught:
        parse(text, name)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_scalars_are_those_of_yaml_1_2() -> None:
    text = "a: 1e-4\nb: no\nc: 2020-01-01\nd: ~\ne: 0o17\nf: 'yes'\ng: 1_000\nh: .inf\ni: true\nj: \"1\"\n"
    assert data(text) == {
        "a": 1e-4,
        "b": "no",
        "c": "2020-01-01",
        "d": None,
        "e": 15,
        "f": "yes",
        "g": "1_000",
        "h": float("inf"),
        "i": True,
        "j": "1",
    }


def test_it_agrees_with_ruamel_on_plain_documents() -> None:
    text = "train:\n  lr: 0.5\n  list: [1, two, [3]]\nmodel: {use: gpt, layers: 4}\nempty:\nfolded: >-\n  a\n  b\n"
    assert data(text) == YAML(typ="safe", pure=True).load(text)


def test_json_is_read_tabs_and_all() -> None:
    content = {"train": {"lr": 1e-4, "note": "a\tb"}, "list": [1, None, True]}
    assert data(json.dumps(content, indent="\t"), "run.json") == content


def test_every_key_knows_its_line_and_column() -> None:
    node = parse("train:\n  seed: 1\n  lr: 2\n", "run.yaml")["train"]
    assert str(node.data["lr"].origin) == "run.yaml line 3 column 3"


def test_an_alias_gives_the_anchored_value() -> None:
    assert data("a: &x [1, 2]\nb: *x\n") == {"a": [1, 2], "b": [1, 2]}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train:\n  lr: 1\n  lr: 2\n", "run.yaml:3:3: the duplicate key 'lr' is refused: it stands on line 2 already"),
        ("train:\n\tlr: 1\n", "run.yaml:2:1: YAML that cannot be read is refused: a tab; indent with spaces"),
        (
            "a: 1\nb: !!python/object:os.system x\n",
            "run.yaml:2:4: the tag '!!python/object:os.system' is refused: a configuration holds plain data",
        ),
        ("%YAML 1.1\n---\na: 1\n", "run.yaml:1:1: the directive '%YAML' is refused"),
        ("# first\n\n%TAG ! x\n---\na: 1\n", "run.yaml:3:1: the directive '%TAG' is refused"),
        ("- a\n", "run.yaml:1:1: this configuration is refused: it is not a mapping"),
        ("text", "run.yaml:1:1: this configuration is refused: it is not a mapping"),
        ("a: [1, 2\n", "run.yaml:2:1: YAML that cannot be read is refused: while parsing a flow sequence"),
        ("a: 1\n---\nb: 2\n", "run.yaml:2:1: a second document is refused"),
        ("a: *x\n", "run.yaml:1:4: the alias *x is refused: no anchor of that name ends before it"),
        ("a: &x [*x]\n", "run.yaml:1:8: the alias *x is refused: no anchor of that name ends before it"),
        ("? [a]\n: b\n", "run.yaml:1:3: a key that is no text is refused"),
        ("a: 1\nb: \x01\n", "run.yaml:2:4: the character '\\x01' is refused"),
        ("a: " + "[" * 60_000, "run.yaml:1:20: this configuration is refused: it is nested deeper than 16"),
    ],
)
def test_what_is_refused_is_said_with_line_and_column(text: str, line: str) -> None:
    assert refusal(text).startswith(line)


def test_an_alias_bomb_is_refused_at_once() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    start = time.process_time()
    message = refusal("\n".join(lines))
    assert message.startswith("run.yaml:4:")
    assert "more than 10000 values, aliases followed" in message
    assert time.process_time() - start < 10  # of this process, to which a busy machine adds little


def test_ten_megabytes_are_refused_unread() -> None:
    start = time.process_time()
    assert refusal("[" * 10_000_000).startswith("run.yaml:1:1: a configuration of 9.5 MiB is refused")
    assert time.process_time() - start < 5


def test_the_largest_configuration_is_read_or_refused_in_seconds() -> None:
    text = "\n".join(f"a{n}: [1, 2, {{b: c}}]" for n in range(20_000))[:MAX_BYTES]
    start = time.process_time()
    with pytest.raises(RunError):
        parse(text, "run.yaml")
    assert time.process_time() - start < 50
