from __future__ import annotations

import pytest

from megatron_run.contracts.quantities import Span


@pytest.mark.parametrize(
    ("text", "samples", "steps"),
    [
        (300, 300 * 32, 300),
        ("300", 300 * 32, 300),
        ("300 steps", 300 * 32, 300),
        ("2k samples", 2000, 62),  # 62.5, rounded to even
        ("0.5M samples", 500_000, 15625),
        ("1%", 320, 10),
        ("0.1 %", 32, 1),
        ("100%", 32_000, 1000),
        (0, 0, 0),
        ("0%", 0, 0),
        ("1 sample", 1, 1),  # a span that is not zero lasts a step
    ],
)
def test_lengths_of_a_run_of_a_thousand_steps_of_32(text: object, samples: int, steps: int) -> None:
    span = Span.parse(text)
    assert (span.samples(32_000, 32), span.steps(1000, 32)) == (samples, steps)


@pytest.mark.parametrize("text", ["1%", "3 samples", "1 step"])
def test_what_is_above_zero_is_a_step_of_the_shortest_run(text: str) -> None:
    """None would be the interval that means never."""
    assert Span.parse(text).steps(20, 32) == 1


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "1.5 steps", "101%", "1k%", "1 epoch", True, None, "1e3"])
def test_what_is_no_span_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="not a"):
        Span.parse(text)


@pytest.mark.parametrize("text", [300, "2000 samples", "1%", "0.1%"])
def test_it_is_written_as_it_is_read(text: object) -> None:
    assert Span.parse(Span.parse(text).written()) == Span.parse(text)
    assert Span.parse(text).written() == text
