"""A format is chosen by name or by the files of a source; what is missing, broken or ambiguous is told in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_run.contracts import Weights
from megatron_run.errors import CheckpointError, ExitCode, InputError, PluginError, RunError
from megatron_run.registry.choose_format import format_of_scripts, format_to_read, format_to_write
from megatron_run.registry.discover import Catalog, scan
from megatron_run.registry.load import load
from tests.support.fake_plugins import FakeSite
from tests.support.resolving import mistake

#: A format that recognises a file by its name; {read} is what its read does.
SOURCE = """
from megatron_run.contracts import Format, PluginInfo, Weights
from megatron_run.hookspecs import hookimpl

class Mine(Format):
    files = "mine.bin"
    def recognises(self, source):
        return {recognises}
    def read(self, source):
        return {read}

@hookimpl
def megatron_run_plugin_info():
    return PluginInfo("format", "{name}", provides=frozenset({"{provides}"}){more})

@hookimpl
def megatron_run_create_format():
    return Mine()
"""


def source(name: str = "mine", **parts: str) -> str:
    given = {
        "recognises": '(source / "mine.bin").is_file()',
        "read": "Weights({}, {})",
        "provides": "import",
        "more": "",
    }
    given |= parts
    text = SOURCE.replace("{name}", name)
    for part, code in given.items():
        text = text.replace(f"{{{part}}}", code)
    return text


def install(site: FakeSite, distribution: str = "acme-mine", name: str = "mine", **parts: str) -> None:
    package = distribution.replace("-", "_")
    site.module(package, source(name, **parts))
    site.distribution(distribution, {"format": {name: package}})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "mine.bin").write_bytes(b"")
    return folder


def refusal(source: Path, word: str | None, catalog: Catalog, code: ExitCode) -> str:
    with pytest.raises(RunError) as caught:
        format_to_read(source, word, catalog)
    assert caught.value.exit_code == code
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_format_of_somebody_else_is_found_by_files_name_distribution_and_path(site: FakeSite, model: Path) -> None:
    install(site)
    file = site.folder / "another.py"
    file.write_text(source())
    for word, name in ((None, "mine"), ("mine", "mine"), ("acme-mine:mine", "mine"), (str(file), "another")):
        chosen = format_to_read(model, word, scan(site.path))
        assert (chosen.name, chosen.read(model)) == (name, Weights({}, {}))


def test_two_that_recognise_a_source_are_named_and_neither_wins(site: FakeSite, model: Path) -> None:
    install(site)
    install(site, "other-mine", "second")
    line = refusal(model, None, scan(site.path), ExitCode.DATA)
    assert line == f"{model} is in 2 formats; say which: --from mine or --from second"
    install(site, "third-mine")
    line = refusal(model, None, scan(site.path), ExitCode.DATA)
    assert line.endswith("--from acme-mine:mine or --from third-mine:mine or --from second")
    assert format_to_read(model, "second", scan(site.path)).name == "second"


def test_adapters_are_no_model_unless_they_are_asked_for(site: FakeSite, model: Path) -> None:
    install(site, provides="adapters")
    catalog = scan(site.path)
    assert refusal(model, None, catalog, ExitCode.INPUT) == (
        f"{model} holds adapters, and not the model that they adapt; "
        f"import them: megatron-run import {model} NEW --base MODEL, then name NEW"
    )
    assert "format=mine cannot be imported" in refusal(model, "mine", catalog, ExitCode.INPUT)
    for word in (None, "mine"):
        assert format_to_read(model, word, catalog, adapters=True).name == "mine"


def test_a_broken_format_is_in_nobodys_way_and_told_when_nothing_is_found(site: FakeSite, model: Path) -> None:
    site.module("acme_broken", "1/0")
    site.distribution("acme-broken", {"format": {"broken": "acme_broken"}})
    install(site, "acme-rude", "rude", recognises="1 / 0")
    install(site)
    assert format_to_read(model, None, scan(site.path)).name == "mine"
    (model / "mine.bin").unlink()
    line = refusal(model, None, scan(site.path), ExitCode.DATA)
    assert "mine: mine.bin" in line
    assert "format=broken is left out: ZeroDivisionError" in line
    assert "format=rude of acme-rude 1.0: recognises failed: ZeroDivisionError" in line


def test_what_a_plugin_raises_by_mistake_names_it(site: FakeSite, model: Path) -> None:
    install(site, read="{}['x']")
    with pytest.raises(PluginError, match=r"plugin format=mine of acme-mine 1.0: read failed: KeyError"):
        format_to_read(model, "mine", scan(site.path)).read(model)


def test_a_format_of_ours_that_is_not_installed_says_what_to_install(tmp_path: Path) -> None:
    nothing = Catalog(())
    line = refusal(tmp_path, None, nothing, ExitCode.DATA)
    assert (
        "for more formats: pip install -e ./plugins/format/distributed or pip install -e ./plugins/format/hugg" in line
    )
    line = refusal(tmp_path, "huggingface", nothing, ExitCode.PLUGIN)
    assert line == (
        "no installed plugin is format=huggingface (from --from huggingface); "
        "pip install -e ./plugins/format/huggingface; installed: none"
    )
    with pytest.raises(PluginError, match=r"pip install -e \./plugins/format/megatron"):
        format_of_scripts("megatron", "config from-megatron", nothing)


def test_an_unknown_name_gets_the_nearest_or_all_that_can_do_it(tmp_path: Path) -> None:
    assert refusal(tmp_path, "hugingface", scan(), ExitCode.INPUT) == (
        "there is no format 'hugingface'; did you mean 'huggingface'?"
    )
    with pytest.raises(InputError, match=r"there is no format 'gguf'; known are distributed, huggingface, peft$"):
        format_to_write("gguf")
    with pytest.raises(
        InputError, match=r"format=megatron cannot be exported to; known are distributed, huggingface, peft$"
    ):
        format_to_write("megatron")
    with pytest.raises(InputError, match=r"format=distributed translates no launch scripts; known are megatron$"):
        format_of_scripts("distributed", "a test")
    (tmp_path / "nowhere2").mkdir()
    with pytest.raises(CheckpointError, match=r"there is no .*nowhere; did you mean 'nowhere2'"):
        format_to_read(tmp_path / "nowhere")


def test_a_format_has_no_options(site: FakeSite) -> None:
    install(site, more=", options=Format")
    with pytest.raises(PluginError, match="a format has none: nothing could set them"):
        load(scan(site.path).entries[0], "a test")


def test_a_run_chooses_no_format() -> None:
    why = "a run chooses no format: a format serves one conversion (from --plugin format=huggingface); "
    line, code = mistake(plugins=["format=huggingface"])
    assert line == f"{why}type megatron-run import SOURCE FOLDER --from NAME, or export SOURCE FOLDER --to NAME"
    assert code == ExitCode.INPUT
    line, _ = mistake("preset:tiny", {"format": "huggingface"})
    assert line.startswith("unknown section 'format'")
    made = format_to_write("huggingface").made
    assert mistake(plugins=[made])[0].startswith("a run chooses no format")
