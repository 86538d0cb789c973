from __future__ import annotations

import math
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field
from ruamel.yaml import YAML

from megatron_run.config.values import core_scalar, plain, read_text
from megatron_run.contracts.quantities import Span


class Colour(Enum):
    RED = "1"


@pytest.mark.parametrize(
    "text",
    ["1", "-3", "+4", "1.5", "1e-4", "-.5", "1.", "true", "False", "null", "~", "0x1f", "0o17", "text", "no", "1.2.3"],
)
def test_scalars_agree_with_ruamel(text: str) -> None:
    assert core_scalar(text) == YAML(typ="safe", pure=True).load(text)


def test_whole_numbers_are_ints_however_written() -> None:
    assert [type(core_scalar(text)) for text in ("1e6", "2.0", "2.5", "1e300")] == [int, int, float, float]


def test_scalars_that_python_chokes_on_stay_text() -> None:
    assert core_scalar("9" * 5000) == "9" * 5000
    assert math.isnan(core_scalar(".nan"))  # type: ignore[arg-type]  # a float, which is what is tested


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (str, "1e-4", "1e-4"),
        (str, "a,b", "a,b"),
        (Path, "no", "no"),
        (float, "1e-4", 1e-4),
        (int | None, "null", None),
        (Path | None, "null", None),
        (bool, "no", "no"),
        (tuple[int, ...], "1,2, 3", [1, 2, 3]),
        (list[str], "1,two", ["1", "two"]),
        (tuple[int, ...], "", []),
        (tuple[str, int], "1,2", ["1", 2]),
        (Literal["auto"] | Annotated[int, Field(ge=1)], "4", 4),
        (Literal["auto"] | int, "auto", "auto"),
        (Literal["1"], "1", "1"),
        (Colour, "1", "1"),
        (Span, "2M samples", "2M samples"),
        (object, "2020-01-01", "2020-01-01"),
    ],
)
def test_text_is_read_by_the_type_of_its_field(annotation: object, text: str, value: object) -> None:
    assert read_text(text, annotation) == value


def test_python_values_become_plain_data() -> None:
    given = {"a": Path("x"), "b": (1, 2.0), "c": Colour.RED, "d": Span.parse("1%"), "e": None}
    assert plain(given) == {"a": "x", "b": [1, 2], "c": "1", "d": "1%", "e": None}
    with pytest.raises(TypeError, match="object cannot be written"):
        plain(object())
