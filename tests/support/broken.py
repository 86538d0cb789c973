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
