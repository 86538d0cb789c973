"""The page: all of it from one file, nothing of a run in it but escaped text, whatever a run folder holds."""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Iterator
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megatron_run_report.page import page
from megatron_run_report.record import Record
from tests.support.run_folders import make_run, step_row, write_lines, write_record

#: Text of a stranger's: as an element, out of an attribute, out of the script, and what UTF-8 cannot say.
FORGED = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\" onload='alert(3)' \udc80\x1b[2J{{ 7*7 }}"


class Elements(HTMLParser):
    """The elements of a page, each with its attributes and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_data(self, data: str) -> None:
        if self._open[-1:] not in (["style"], ["script"]) or data.strip() == "":
            self.texts.append(data)

    def tags(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.found if tag == name]


def pictures(text: str) -> Iterator[ElementTree.Element]:
    for found in re.findall(r"<svg .*?</svg>", text, re.DOTALL):
        yield ElementTree.fromstring(found)


def forged_run(folder: Path) -> Path:
    run = make_run(folder)
    write_lines(run / "samples.jsonl", [{"step": 8, "attempt": 1, "text": FORGED}])
    write_lines(run / "metrics.jsonl", [step_row(step, extra={FORGED: step, "<b>own</b>": step}) for step in (1, 2)])
    write_lines(run / "eval.jsonl", [{"step": 1, "split": FORGED, "loss": 1.0}])
    log = run / "logs" / "attempt-001" / "rank-00000.log"
    log.write_bytes(f"observer mine failed: {FORGED}".encode(errors="surrogatepass"))
    plan = json.loads((run / "plan.json").read_text())
    for rank in plan["topology"]["ranks"]:
        rank["layers_text"] = FORGED
    plan["plugins"] = {FORGED: [{"name": FORGED}]}
    plan["notices"] = [FORGED]
    write_record(run, "plan", plan)
    attempt = {"time": FORGED, "arguments": [FORGED], "host": FORGED, "ranks": FORGED, "git": {"commit": FORGED}}
    write_record(run, "run", {"attempts": [attempt]})
    write_record(run, "environment", {"host": FORGED, "packages": {FORGED: FORGED}, "variables": {FORGED: FORGED}})
    write_record(run, "device", {"name": FORGED, "peak_tflops": 1e400, "peak_source": FORGED})
    status = json.loads((run / "status.json").read_text())
    write_record(run, "status", {**status, "state": FORGED, "message": FORGED, "exit_code": FORGED})
    (run / "config.yaml").write_text(json.dumps({"schedule": {"use": FORGED}, "a<b>": FORGED}))
    return run


def test_the_page_needs_nothing_else_and_its_policy_allows_its_script_alone(tmp_path: Path) -> None:
    text = page([Record(make_run(tmp_path / "one"))])
    found = Elements(text)
    assert not {tag for tag, _ in found.found} & {"link", "iframe", "object", "embed", "base", "form", "video", "audio"}
    sources = [value for _, attributes in found.found for name, value in attributes.items() if name in ("src", "href")]
    assert all(value and value.startswith(("data:", "#")) for value in sources)
    assert "url(" not in text
    assert "@import" not in text
    script = re.findall(r"<script>(.*)</script>", text, re.DOTALL)
    assert len(script) == 1
    digest = b64encode(sha256(script[0].encode()).digest()).decode()
    (policy,) = [each["content"] for each in found.tags("meta") if each.get("http-equiv")]
    assert policy == (f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'")


def test_text_of_a_stranger_is_text(tmp_path: Path) -> None:
    text = page([Record(forged_run(tmp_path / f"<i>{'x' * 9}")), Record(make_run(tmp_path / "two"))])
    text.encode()
    found = Elements(text)
    assert len(found.tags("script")) == 1
    assert all("data:" in str(image["src"]) for image in found.tags("img"))
    assert not [name for _, attributes in found.found for name in attributes if name.startswith("on")]
    assert not found.tags("i")
    assert not found.tags("b")
    shown = "".join(found.texts)
    assert shown.count("alert(1)") >= 15, "it is shown, wherever it was"
    assert "{{ 7*7 }}" in shown
    assert not {"\x1b", "\udc80"} & set(text)
    assert [*pictures(text)]


def test_a_page_has_every_part_of_a_run(tmp_path: Path) -> None:
    text = page([Record(make_run(tmp_path / "one"))])
    shown = "".join(Elements(text).texts)
    for part in (
        "finished, exit code 0", "0.5000", "1.2500 at step 8", "Training loss", "Validation loss", "Learning rate",
        "world 2 = tensor 1 x pipeline 2 x data 1; 2 chunks per stage", "bubble 12.5%", "once upon a time",
        "observer obs failed", "saved 1 MB", "megatron-run 'my run.yaml'", "a processor", "3.11.7", "use: interleaved",
        "model/aux",
    ):  # fmt: skip
        assert part in shown, part
    assert "step 1/8  loss 4.0" not in shown, "curves show the steps"
    assert "What differs" not in shown
    assert len([*pictures(text)]) >= 8


def test_the_axis_of_memory_begins_at_zero_and_a_figure_has_no_band_for_what_nobody_points_at(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    write_lines(run / "metrics.jsonl", [step_row(step, memory_peak_gib=30 + step / 100) for step in range(1, 9)])
    text = page([Record(run)])
    memory = next(each for each in pictures(text) if each.get("aria-label") == "Peak memory of rank 0 over steps")
    assert "GiB" in {each.text for each in memory.iter("text")}
    assert next(each.text for each in memory.iter("text") if each.get("text-anchor") == "end") == "0"
    style = re.findall(r"\.readout \{(.*?)\}", text)[0]
    height, margin = (re.search(pattern, style) for pattern in (r"\bheight: (\d+)px", r"margin: -(\d+)px"))
    assert height
    assert margin
    assert height[1] == margin[1], "it lies over the word below the axis while somebody points"


def test_the_step_of_many_microbatches_is_whole_and_keeps_its_width(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    plan = json.loads((run / "plan.json").read_text())
    write_record(run, "plan", {**plan, "plans": [{"microbatches": 64}]})
    (image,) = Elements(page([Record(run)])).tags("img")
    picture = ElementTree.fromstring(b64decode(str(image["src"]).partition(",")[2]))
    assert len([each for each in picture.iter() if each.get("class", "").startswith("action")]) == 2 * 2 * 2 * 64
    assert image["class"] == "paper wide"


def test_the_step_of_a_run_on_fewer_ranks_is_drawn_as_it_was_planned_and_not_as_it_was_typed(tmp_path: Path) -> None:
    """Typed were two stages of two chunks."""
    run = make_run(tmp_path / "one")
    plan = json.loads((run / "plan.json").read_text())
    topology = {**plan["topology"], "pipeline": 1, "chunks": 1}
    plugins = {"schedule": [{"name": "gpipe", "options": {}}]}
    write_record(run, "plan", {**plan, "topology": topology, "plugins": plugins, "plans": [{"microbatches": 4}]})

    def actions() -> int:
        (image,) = Elements(page([Record(run)])).tags("img")
        picture = ElementTree.fromstring(b64decode(str(image["src"]).partition(",")[2]))
        return len([each for each in picture.iter() if each.get("class", "").startswith("action")])

    typed = actions()
    for config in run.rglob("config.yaml"):
        config.write_text(config.read_text() + "run: {elastic: plan}\n")
    assert (typed, actions()) == (2 * 2 * 2 * 4, 2 * 4)


def test_two_runs_share_pictures_and_the_page_says_in_what_they_differ(tmp_path: Path) -> None:
    text = page([Record(make_run(tmp_path / "one")), Record(make_run(tmp_path / "two", lr=3e-3))])
    shown = " ".join(" ".join(Elements(text).texts).split())
    assert "key A B train.lr 0.001 0.003 " in shown
    loss = next(each for each in pictures(text) if each.get("aria-label") == "Training loss over steps")
    assert [each.get("data-run") for each in loss.iter("g")] == ["A", "B"]
    assert shown.count("once upon a time") == 2


@pytest.mark.parametrize("name", ["run", "plan", "environment", "device", "status"])
@pytest.mark.parametrize(
    "content", [None, [], 3, "x", {"attempts": [1, {}], "topology": [], "packages": 3, "plans": {}}]
)
def test_a_record_that_is_missing_or_of_another_shape_is_empty(tmp_path: Path, name: str, content: Any) -> None:
    run = make_run(tmp_path / "one")
    write_record(run, name, content)
    assert "Training loss" in page([Record(run)])
    (run / f"{name}.json").write_text("{")
    assert "Training loss" in page([Record(run)])


def test_a_run_of_an_early_version_has_a_page(tmp_path: Path) -> None:
    run = tmp_path / "one"
    run.mkdir()
    rows: list[dict[str, Any]] = [{"step": step, "loss": 1.0 / step, "lr": 1e-3} for step in (1, 2, 3)]
    write_lines(run / "metrics.jsonl", [*rows, {"step": 4, "changes": {"train.lr": [1e-3, 1e-4]}}])
    shown = "".join(Elements(page([Record(run)])).texts)
    for part in ("unknown", "Training loss", "does not tell its ranks", "has no config.yaml", "train.lr", "0.0001"):
        assert part in shown, part


def test_a_run_that_has_not_begun_a_step_has_a_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", steps=0)
    (run / "eval.jsonl").unlink()
    record = Record(run)
    record.time = 1.7e9 + 5
    status = json.loads((run / "status.json").read_text())
    write_record(run, "status", {**status, "state": "starting", "exit_code": None})
    shown = "".join(Elements(page([record])).texts)
    assert "starting, last sign of life 5 s before this report" in shown
    assert "No step was written to metrics.jsonl." in shown


def test_a_page_of_a_long_run_stays_small(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one")
    write_lines(run / "metrics.jsonl", (step_row(step, loss=1 / step) for step in range(1, 3000)))
    (run / "logs" / "attempt-001" / "rank-00000.log").write_text("a line that says something\n" * 100_000)
    write_lines(run / "samples.jsonl", ({"step": step, "text": "x" * 100_000} for step in range(40)))
    assert len(page([Record(run)])) < 700_000
