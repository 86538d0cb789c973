"""The plugins of the authors' guide are real: each loads from its one file and keeps its kind's contract."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from megatron_run.config.request import Request
from megatron_run.contracts import KINDS, RUN_KINDS
from megatron_run.errors import ExitCode
from megatron_run.planning import resolve
from megatron_run_cli.main import main
from megatron_run_engine.launch import train
from megatron_run_testing.conformance import check
from tests.docs.quoted import quotes
from tests.docs.test_docs_pages import LINK
from tests.support.checkout import ROOT

EXAMPLES = ROOT / "tests" / "examples" / "plugins"
RULES = ROOT / "tests" / "examples" / "rules"
LION, LION_PACKAGE = RULES / "lion.py", RULES / "lion_package.py"
GUIDE = ROOT / "docs" / "plugin-authors.md"
RULE_GUIDE = ROOT / "core" / "engine" / "README.md"
CONTRACTS = ROOT / "core/kernel/src/megatron_run/contracts"


def example(kind: str) -> Path:
    return EXAMPLES / f"{kind.replace('-', '_')}.py"


@pytest.mark.parametrize("kind", KINDS)
def test_the_guide_has_rules_an_example_and_the_contract_of_each_kind(kind: str) -> None:
    page = GUIDE.read_text(encoding="utf-8")
    linked = {(GUIDE.parent / target).resolve() for target, _ in LINK.findall(page)}
    assert {example(kind), CONTRACTS / example(kind).name} <= linked
    assert f"\n### {kind}: " in page


def test_the_readme_quotes_one_plugin_the_guide_another_and_the_engine_a_rule_with_its_package() -> None:
    pages = (ROOT / "README.md", GUIDE, RULE_GUIDE)
    shown = [name for page in pages for name in quotes(page.read_text(encoding="utf-8"))]
    files = (example("schedule"), example("observer"), LION, LION_PACKAGE)
    assert shown == [file.relative_to(ROOT).as_posix() for file in files]


def test_the_packaged_rule_of_the_engines_page_conforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's own commands and files, in the order in which it names them."""
    page = RULE_GUIDE.read_text(encoding="utf-8")
    typed = re.search(r"type `megatron-run (plugins new [^`]+)`", page)
    place = re.search(r"`lion\.py` in\s+`([^`]+)`", page)
    tried = re.search(r"`megatron-run plugins check\s+([^`]+)`", page[place.end() :] if place else "")
    assert typed, "the page makes the package"
    assert place, "and says where the rule lies in it"
    assert tried, "and tries it"
    monkeypatch.chdir(tmp_path)
    assert main(typed[1].split()) == 0
    assert Path(place[1], "__init__.py").is_file(), "what the page lets it be takes the place of what was made"
    shown = quotes(page)
    for name, example_file in (("lion.py", LION), ("__init__.py", LION_PACKAGE)):
        Path(place[1], name).write_text(shown[example_file.relative_to(ROOT).as_posix()] + "\n", encoding="utf-8")
    (report,) = check(tried[1])
    assert (report.plugin, report.passed) == ("optimizer=lion", True), [
        f"{result.name}: {result.message}" for result in report.results if not result.passed
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_conforms(kind: str) -> None:
    (report,) = check(str(example(kind)))
    assert report.plugin == f"{kind}={example(kind).stem}"
    assert report.passed, [f"{result.name}: {result.message}" for result in report.results if not result.passed]


def test_all_that_a_run_chooses_train_together(tmp_path: Path) -> None:
    layers = f"parallel-layer=dense+{example('parallel-layer')}"
    others = [f"{kind}={example(kind)}" for kind in RUN_KINDS if kind != "parallel-layer"]
    config = {
        "run": {"folder": str(tmp_path / "run")},
        "train": {
            "steps": 60,
            "sequence_length": 16,
            "micro_batch_size": 4,
            "global_batch_size": 8,
            "lr": 0.02,
            "lr_shape": "constant",
        },
        "eval": {"interval": 30, "batches": 1},
        "data": str(example("data")),
        "observer": ["jsonl"],
    }
    run = resolve(Request(configs=(config,), plugins=(layers, *others)))
    assert train(run).code is ExitCode.DONE

    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[0] == pytest.approx(math.log(16), abs=0.05), "an untrained model guesses"
    assert losses[-1] < 0.1, "the next number follows from this one"
    assert {json.loads(line)["loss_scale"] for line in lines} == {1024.0}
    best = (tmp_path / "run" / "best.txt").read_text(encoding="utf-8")
    loss, _, step = best.splitlines()[-1].partition(" at step ")
    assert float(loss) < 0.1
    assert step in ("30", "60"), "both are near zero by then, and rounding says which is nearer"


@pytest.mark.nightly
def test_columns_of_the_datasets_library_conform_and_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets = pytest.importorskip("datasets")
    texts = [f"line {number} of a table, which is text" for number in range(300)]
    rows = datasets.Dataset.from_dict({"text": texts, "other": range(300)})
    splits = dict.fromkeys(("train", "validation", "test"), rows)
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "table")
    plugin, path = f"data={EXAMPLES / 'hugging_face_data.py'}", f"data.path={tmp_path / 'table'}"
    (report,) = check(plugin, [path])
    assert report.passed, [f"{result.name}: {result.message}" for result in report.results if not result.passed]
    sets = (path, "train.steps=2", "train.sequence_length=16", f"run.folder={tmp_path / 'run'}")
    assert train(resolve(Request(configs=("preset:tiny",), sets=sets, plugins=(plugin,)))).code is ExitCode.DONE
