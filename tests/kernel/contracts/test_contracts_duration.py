from __future__ import annotations

from pathlib import Path

import pytest

from megatron_run.contracts.quantities import Duration
from megatron_run.errors import Problems
from megatron_run.planning import load_config, to_yaml


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("45 s", 45), (3600, 3600), ("90 min", 5400), ("11.5h", 41400), ("2 d", 172800), (0.5, 0.5)],
)
def test_lengths_of_time(text: object, seconds: float) -> None:
    assert Duration.parse(text).seconds == seconds


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "0 s", "5 weeks", "1e3", "h", True, None, "1 h 30 min"])
def test_what_is_no_length_of_time_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="not a length of time: write"):
        Duration.parse(text)


@pytest.mark.parametrize("text", ["90 min", "3600", "11.5h"])
def test_a_configuration_holds_it_as_it_was_written(text: str, tmp_path: Path) -> None:
    run = load_config("preset:tiny", sets=[f"run.time_limit={text}"])
    (tmp_path / "again.yaml").write_text(to_yaml(run))
    again = load_config(tmp_path / "again.yaml").config.run.time_limit
    assert again == run.config.run.time_limit == Duration.parse(text)


def test_the_command_line_says_what_is_wrong_with_it() -> None:
    with pytest.raises(Problems, match="time_limit=soon: 'soon' is not a length of time"):
        load_config("preset:tiny", sets=["run.time_limit=soon"])
