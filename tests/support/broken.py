"""A folder of everything that a user can get wrong: plugin files, configurations, distributions."""

from __future__ import annotations

from pathlib import Path

from tests.support.fake_plugins import FakeSite, schedule_source
from tests.support.plugin_file import schedule_file

GOOD = schedule_source("mine")
DEADLOCK = """
forwards = [Action("F", m, 0) for m in range(spec.microbatches)]
backwards = [Action("B", m, 0) for m in range(spec.microbatches)]
alternating = [action for pair in zip(forwards, backwards) for action in pair]
return [alternating, forwards + backwards]
"""
ONLY_EVEN = """
order = [Action(op, m, 0) for m in range(spec.microbatches) for op in "FB"]
return [order[: -(spec.microbatches % 2) or None]] * spec.stages
"""
#: The actions of schedules that are no legal plan.
ILLEGAL = {
    "dropped": 'return [[Action("F", 0, 0), Action("B", 0, 0)]] * spec.stages',
    "duplicated": 'return [[Action(op, m, 0) for m in range(spec.microbatches) for op in "FBB"]] * spec.stages',
    "disordered": 'return [[Action(op, m, 0) for m in range(spec.microbatches) for op in "BF"]] * spec.stages',
    "deadlock": DEADLOCK,
    "sometimes": ONLY_EVEN,
    "crashes": "return 1 / 0",
}
#: Plugins in single files, and configurations.
FILES = {
    "exits.py": "import sys\nsys.exit(3)\n",
    "raises.py": "raise KeyError('half a plugin')\n",
    "misspelt.py": GOOD.replace("create_schedule", "create_shedule"),
    "colour.py": GOOD.replace("create_schedule()", "create_schedule(colour)"),
    "nothing.py": GOOD.replace("return Mine()", "return None"),
    "number.py": GOOD.replace("return Mine()", "return 3"),
    "signature.py": GOOD.replace("create_schedule()", "create_schedule(options, *, context)"),
    "duplicate.yaml": "train:\n  lr: 1\n  lr: 2\n",
    "unknown.yaml": "train:\n  lrr: 1\n",
    "typed.yaml": "train:\n  seed: soon\n",
    "bounded.yaml": "schedule:\n  use: ./depth.py\n  depth: 4\n",
    "tab.yaml": "train:\n\tlr: 1\n",
    "tag.yaml": "train:\n  lr: !!python/object:os.system 1\n",
    "bomb.yaml": "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 10)}]" for n in range(9)),
    "deep.yaml": f"train: {'[' * 5000}\n",
    "huge.yaml": "[" * 10_000_000,
    "directive.yaml": "%YAML 1.1\n---\ntrain: {}\n",
}


def write_broken(folder: Path) -> FakeSite:
    """Write all of them into ``folder``; the site of the distributions, which are installed badly."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for name, actions in ILLEGAL.items():
        schedule_file(folder / f"{name}.py", actions=actions)
    schedule_file(folder / "depth.py", options="depth: int = Field(1, le=3)")
    schedule_file(folder / "needy.py", info='requires=frozenset({"optimizer=zero1"})')
    site = FakeSite(folder / "site")
    site.schedule("twin", distribution="acme-one")
    site.schedule("twin", distribution="acme-two")
    site.schedule("sequential", distribution="acme-shadow")
    for name, kernel in {"future": ">=9", "newer": ">=0.99,<0.100"}.items():
        site.module(f"acme_{name}", "raise AssertionError('it was imported')")
        requires = [f"megatron-run-core{kernel}"]
        site.distribution(f"acme-{name}", {"schedule": {name: f"acme_{name}"}}, requires=requires)
    return site


_DATA = """
import numpy as np
from pydantic import BaseModel, ConfigDict

from megatron_run.contracts import DataSource, PluginInfo
from megatron_run.hookspecs import hookimpl


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    vocab_size: int = 50


class Broken(DataSource):
    vocab_size = 50

    def dataset(self, split, sequence_length, seed):
        ids = np.arange(sequence_length) % 50
        mask = np.ones(sequence_length, np.float32)
        return [{{"tokens": {ids}, "labels": ids, "loss_mask": mask}} for _ in range(64)]


@hookimpl
def megatron_run_plugin_info():
    return PluginInfo("data", "broken", options=Options)


@hookimpl
def megatron_run_create_data():
    return Broken()
"""
_LAYERS = """
from megatron_run.contracts import PluginInfo, StackedLayers
from megatron_run.hookspecs import hookimpl


class Broken(StackedLayers):
    {method}


@hookimpl
def megatron_run_plugin_info():
    return PluginInfo("parallel-layer", "broken")


@hookimpl
def megatron_run_create_parallel_layer(base):
    return Broken(base)
"""
_SCALER = """
import torch

from megatron_run.contracts import PluginInfo, Scaler
from megatron_run.hookspecs import hookimpl


class Broken(Scaler):
    def __init__(self):
        self._scale = torch.full({shape}, 1024.0)

    @property
    def scale(self):
        return self._scale

    def update(self, found_inf):
        {update}


@hookimpl
def megatron_run_plugin_info():
    return PluginInfo("scaler", "broken", provides=frozenset({{"train.precision=fp16"}}))


@hookimpl
def megatron_run_create_scaler():
    return Broken()
"""
#: Single-file plugins that break their contracts only once a run builds or trains: kind, source, exit code.
BROKEN_IN_A_RUN: dict[str, tuple[str, str, int]] = {
    "outside": ("data", _DATA.format(ids="ids + 51"), 5),
    "floats": ("data", _DATA.format(ids="ids.astype(np.float32)"), 5),
    "no_layer": ("parallel-layer", _LAYERS.format(method="def norm(self, kind, size, eps=1e-5): return None"), 3),
    "no_base": ("parallel-layer", _LAYERS.format(method="def __init__(self, base): pass"), 3),
    "scalar": ("scaler", _SCALER.format(shape="()", update="pass"), 3),
    "moves": ("scaler", _SCALER.format(shape="(1,)", update="self._scale = self._scale.clone()"), 3),
    "stateless": ("scaler", _SCALER.format(shape="(1,)", update="self._scale.mul_(2)"), 3),
}


def write_broken_in_a_run(folder: Path) -> dict[str, tuple[str, int]]:
    """Write them into ``folder``: what to choose each with, and the exit code of a run that does."""
    made = {}
    for name, (kind, source, code) in BROKEN_IN_A_RUN.items():
        (folder / f"{name}.py").write_text(source)
        made[name] = (f"{kind}={'dense+' if kind == 'parallel-layer' else ''}{folder / name}.py", code)
    return made
