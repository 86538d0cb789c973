from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_run.contracts import Schedule
from megatron_run.errors import ExitCode, PluginError, ScheduleError, ToldToEnd
from megatron_run.registry.choose import choose
from megatron_run.registry.discover import Catalog, Entry, scan
from megatron_run.registry.load import load
from megatron_run.registry.loaded_plugin import NoOptions, Plugin
from tests.support.fake_plugins import FakeSite, schedule_source

GOOD = schedule_source()
INFO = 'PluginInfo("schedule", "zigzag"'


def loaded(site: FakeSite, source: str = GOOD) -> Plugin:
    site.schedule(source=source)
    return load(choose(scan(site.path), "schedule", "zigzag", "--plugin"), "--plugin schedule=zigzag")


def refusal(site: FakeSite, source: str) -> PluginError:
    with pytest.raises(PluginError) as caught:
        loaded(site, source)
    assert caught.value.exit_code == ExitCode.PLUGIN
    return caught.value


def test_a_loaded_plugin_knows_where_it_came_from(site: FakeSite) -> None:
    plugin = loaded(site)
    assert (plugin.kind, plugin.name, plugin.distribution, plugin.version) == (
        "schedule",
        "zigzag",
        "acme-zigzag",
        "1.0",
    )
    assert plugin.origin == "--plugin schedule=zigzag"
    assert plugin.location == str(site.folder / "acme_zigzag" / "__init__.py")
    assert plugin.provides == {"schedule=zigzag"}
    assert plugin.options_model is NoOptions
    assert isinstance(plugin.create(), Schedule)


def test_every_built_in_loads() -> None:
    for entry in scan().entries:
        if entry.builtin:
            plugin = load(entry, "test")
            assert (plugin.kind, plugin.name) == (entry.kind, entry.name)


def test_two_plugins_do_not_see_each_other(site: FakeSite) -> None:
    first = loaded(site)
    site.schedule("other", distribution="acme-other")
    second = load(choose(scan(site.path), "schedule", "other", "test"), "test")
    assert type(first.create()).__module__ == "acme_zigzag"
    assert type(second.create()).__module__ == "acme_other"


def test_an_entry_point_may_name_an_object_in_a_module(site: FakeSite) -> None:
    site.module(
        "acme_zigzag",
        GOOD.replace("@hookimpl", "    @staticmethod\n    @hookimpl")
        .replace("\ndef megatron", "\n    def megatron")
        .replace("    @staticmethod", "class Plugin:\n    @staticmethod", 1)
        .replace("\n    return", "\n        return"),
    )
    site.distribution("acme-zigzag", {"schedule": {"zigzag": "acme_zigzag:Plugin"}})
    plugin = load(choose(scan(site.path), "schedule", "zigzag", "test"), "test")
    assert isinstance(plugin.create(), Schedule)


@pytest.mark.parametrize(
    ("source", "cause", "why"),
    [
        ("raise SystemExit(3)", SystemExit, "SystemExit: 3"),
        ("import sys; sys.exit()", SystemExit, "SystemExit: "),
        ("raise ValueError('two\\nlines')", ValueError, "ValueError: two lines"),
        ("import nowhere", ImportError, "ModuleNotFoundError: No module named 'nowhere'"),
        ("def", SyntaxError, "SyntaxError: invalid syntax (__init__.py, line 1)"),
        ("class Odd(BaseException): pass\nraise Odd('odd')", BaseException, "Odd: odd"),
    ],
)
def test_an_import_that_fails_names_plugin_distribution_and_version(
    site: FakeSite, source: str, cause: type[BaseException], why: str
) -> None:
    error = refusal(site, source)
    assert str(error) == (
        f"plugin schedule=zigzag of acme-zigzag 1.0 cannot be imported: {why} (from --plugin schedule=zigzag); "
        f"correct line {source.count(chr(10)) + 1} of {site.folder}/acme_zigzag/__init__.py, choose another plugin, "
        "or see the whole cause with --debug"
    )
    assert isinstance(error.__cause__, cause)
    assert "acme_zigzag" not in sys.modules


def test_a_signal_is_not_the_plugins_fault(site: FakeSite) -> None:
    with pytest.raises(ToldToEnd):
        refusal(site, "from megatron_run.errors import ToldToEnd\nraise ToldToEnd")


def test_an_interrupt_is_not_the_plugins_fault(site: FakeSite) -> None:
    with pytest.raises(KeyboardInterrupt):
        loaded(site, "raise KeyboardInterrupt")


MISSPELT = GOOD.replace("megatron_run_create_schedule", "megatron_run_create_shedule")
EXTRA = GOOD.replace("create_schedule()", "create_schedule(context, options)")
UNMARKED = GOOD.replace("@hookimpl\ndef megatron_run_create", "def megatron_run_create")
NO_FACTORY = GOOD[: GOOD.rindex("@hookimpl")]
NO_INFO = GOOD.replace("@hookimpl\ndef megatron_run_plugin_info", "def plugin_info")
OPTIONS = "from pydantic import BaseModel\nclass Options(BaseModel):\n    size: int = 1\n"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (MISSPELT, "unknown hook megatron_run_create_shedule; did you mean 'megatron_run_create_schedule'?"),
        (EXTRA, "megatron_run_create_schedule has no argument 'context'; it has options"),
        (UNMARKED, "megatron_run_create_schedule is not marked @hookimpl"),
        (NO_FACTORY, "it has no megatron_run_create_schedule"),
        (NO_INFO, "it has no megatron_run_plugin_info"),
        (
            GOOD.replace('return PluginInfo("schedule", "zigzag")', "raise KeyError('x')"),
            "megatron_run_plugin_info failed: KeyError: 'x'",
        ),
        (
            GOOD.replace('return PluginInfo("schedule", "zigzag")', "pass"),
            "megatron_run_plugin_info returned None, and must return a megatron_run.PluginInfo",
        ),
        (
            GOOD.replace('PluginInfo("schedule", "zigzag")', '{"kind": "schedule"}'),
            "megatron_run_plugin_info returned an object of type dict, and must return a megatron_run.PluginInfo",
        ),
        (
            GOOD.replace('"zigzag"', '"zagzig"'),
            "megatron_run_plugin_info says schedule=zagzig, and it was chosen as schedule=zigzag",
        ),
        (
            GOOD.replace(INFO, 'PluginInfo("model", "zigzag"'),
            "megatron_run_plugin_info says model=zigzag, and it was chosen as schedule=zigzag",
        ),
        (
            GOOD.replace(INFO, INFO + ", api=2"),
            "megatron_run_plugin_info says api=2, and this kernel knows schedule up to api=1: a newer kernel is needed",
        ),
        (
            GOOD.replace(INFO, INFO + ', provides="parallel.pipeline"'),
            "megatron_run_plugin_info says provides='parallel.pipeline', which must be a frozenset",
        ),
        (
            GOOD.replace(INFO, INFO + ", options=dict"),
            "megatron_run_plugin_info says options=<class 'dict'>, which must be a pydantic BaseModel class",
        ),
        (
            OPTIONS + GOOD.replace(INFO, INFO + ", options=Options"),
            'megatron_run_plugin_info says options=Options, which must set ConfigDict(frozen=True, extra="forbid")',
        ),
    ],
)
def test_a_broken_contract_is_named(site: FakeSite, source: str, why: str) -> None:
    assert str(refusal(site, source)) == (
        f"plugin schedule=zigzag of acme-zigzag 1.0 breaks its contract: {why} "
        "(from --plugin schedule=zigzag); choose another schedule, or correct this one"
    )


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return None", "it returned None, and must return a megatron_run.contracts.Schedule"),
        ("return 3", "it returned an object of type int, and must return a megatron_run.contracts.Schedule"),
        ("return Mine", "it returned an object of type ABCMeta, and must return a megatron_run.contracts.Schedule"),
        ("raise OSError('no disk')", "OSError: no disk"),
        ("raise SystemExit(2)", "SystemExit: 2"),
    ],
)
def test_a_factory_that_fails_is_named_with_its_hook(site: FakeSite, body: str, why: str) -> None:
    plugin = loaded(site, GOOD.replace("return Mine()", body))
    with pytest.raises(PluginError) as caught:
        plugin.create()
    assert caught.value.exit_code == ExitCode.PLUGIN
    assert str(caught.value) == (
        f"plugin schedule=zigzag of acme-zigzag 1.0: megatron_run_create_schedule failed: {why} "
        "(from --plugin schedule=zigzag); choose another schedule, or see the whole cause with --debug"
    )


def test_a_factory_with_another_signature_is_named(site: FakeSite) -> None:
    plugin = loaded(site, GOOD.replace("create_schedule()", "create_schedule(options, *, needed)"))
    with pytest.raises(PluginError, match=r"megatron_run_create_schedule failed: TypeError: .*'needed'"):
        plugin.create()


def test_a_plugins_own_refusal_passes_unchanged(site: FakeSite) -> None:
    refuses = "from megatron_run.errors import ScheduleError; raise ScheduleError('no GPU')"
    plugin = loaded(site, GOOD.replace("return Mine()", refuses))
    with pytest.raises(ScheduleError, match=r"^no GPU$"):
        plugin.create()


WITH_OPTIONS = OPTIONS.replace(
    "    size", '    model_config = {"frozen": True, "extra": "forbid"}\n    size'
) + GOOD.replace(INFO, INFO + ", options=Options").replace("create_schedule()", "create_schedule(options)").replace(
    "return Mine()", "made = Mine(); made.size = options.size; return made"
)


def test_options_reach_the_factory_and_default_without_a_configuration(site: FakeSite) -> None:
    plugin = loaded(site, WITH_OPTIONS)
    assert plugin.create().size == 1
    chosen = plugin.with_options(plugin.options_model.model_validate({"size": 7}))
    assert chosen.create().size == 7
    assert plugin.options is None


def test_a_plugin_without_its_required_options_says_which(site: FakeSite) -> None:
    plugin = loaded(site, WITH_OPTIONS.replace("size: int = 1", "size: int"))
    with pytest.raises(PluginError, match=r"^plugin schedule=zigzag cannot be made without the options size$"):
        plugin.create()


def test_a_single_file_needs_no_package(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(schedule_source("another-name"))
    plugin = load(choose(Catalog(()), "schedule", str(file), "test"), "test")
    assert (plugin.name, plugin.info.name, plugin.distribution) == ("mine", "mine", "")
    assert plugin.source == str(file.resolve())
    assert isinstance(plugin.create(), Schedule)
    assert not list(tmp_path.glob("__pycache__"))


def test_two_files_of_one_name_are_two_plugins(tmp_path: Path) -> None:
    files = [tmp_path / folder / "mine.py" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text(schedule_source() + f"\nMine.where = {file.parent.name!r}\n")
    plugins = [load(choose(Catalog(()), "schedule", str(file), "test"), "test") for file in files]
    made = [plugin.create() for plugin in plugins]
    assert [each.where for each in made] == ["a", "b"]
    assert [sys.modules[type(each).__module__].__file__ for each in made] == [str(file) for file in files]
    assert plugins[0].digest != plugins[1].digest


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(schedule_source())
    with pytest.raises(PluginError, match="breaks its contract: it has no megatron_run_create_model"):
        load(choose(Catalog(()), "model", str(file), "test"), "test")


def test_a_file_that_fails_names_its_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("raise SystemExit('stop')")
    with pytest.raises(PluginError) as caught:
        load(choose(Catalog(()), "schedule", str(file), "test"), "test")
    assert str(caught.value).startswith(f"plugin schedule=mine of {file} cannot be imported: SystemExit: stop")
    assert caught.value.fix.startswith(f"correct line 1 of {file}, choose another")
    assert not [name for name, module in sys.modules.items() if getattr(module, "__file__", None) == str(file)]


def test_the_last_line_of_its_own_is_named_not_that_of_a_library(tmp_path: Path) -> None:
    file, beside = tmp_path / "mine.py", tmp_path / "beside_mine.py"
    for text, place in (("\nimport", f"line 2 of {beside}"), ("import json\n\njson.loads('')", f"line 3 of {beside}")):
        file.write_text("\n\n\nimport beside_mine")
        beside.write_text(text)
        with pytest.raises(PluginError) as caught:
            load(choose(Catalog(()), "schedule", str(file), "test"), "test")
        assert caught.value.fix.startswith(f"correct {place}, ")


def test_a_file_whose_kind_nobody_knows_yet_is_called_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import")
    with pytest.raises(PluginError, match=r"^plugin mine of "):
        load(Entry("", file.stem, str(file), location=str(file)), "test")


CHECKED = """
def check(device, options):
    if device != "cuda:0":
        raise {error}
"""


def checked(site: FakeSite, error: str) -> Plugin:
    source = GOOD.replace(f"{INFO})", f"{INFO}, check_device=check)")
    imports = "from megatron_run.errors import PluginError\n"
    return loaded(site, imports + source + CHECKED.replace("{error}", error))


def test_a_plugin_without_a_check_runs_on_any_device(site: FakeSite) -> None:
    loaded(site).check_device("cpu")


def test_a_plugin_may_refuse_a_device(site: FakeSite) -> None:
    plugin = checked(site, 'PluginError("zigzag needs a GPU", fix="choose 1f1b")')
    plugin.check_device("cuda:0")
    with pytest.raises(PluginError) as refused:
        plugin.check_device("cpu")
    assert str(refused.value) == "zigzag needs a GPU (from --plugin schedule=zigzag); choose 1f1b"


def test_a_check_is_given_the_options(site: FakeSite) -> None:
    plugin = checked(site, "PluginError(type(options).__name__)")
    with pytest.raises(PluginError, match="NoOptions"):
        plugin.check_device("cpu")


def test_a_check_that_crashes_is_an_error_of_the_plugin(site: FakeSite) -> None:
    with pytest.raises(PluginError, match=r"acme-zigzag 1\.0: check_device failed: ZeroDivisionError: oops"):
        checked(site, 'ZeroDivisionError("oops")').check_device("cpu")


@pytest.mark.parametrize("check", ["3", "lambda device: None"])
def test_a_check_that_cannot_be_called_breaks_the_contract(site: FakeSite, check: str) -> None:
    source = GOOD.replace(f"{INFO})", f"{INFO}, check_device={check})")
    message = str(refusal(site, source))
    assert "says check_device=" in message
    assert "which must be a function of the device and the options, or None" in message
