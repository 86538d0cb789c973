"""What a process has one of is set where it is given back, or in a process that is the setter's own.

That is: the environment, signal handlers, warnings filters, torch's switches, what lies in ``sys``. A file that sets
one stands below, with what it sets. And nobody asks ``select``, which knows no descriptor above 1,023.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.test_architecture_sources import SCRIPTS, SOURCES, TESTS
from tests.support.checkout import ROOT

ENGINE, SUITES = "core/engine/src/megatron_run_engine", "core/testing/src/megatron_run_testing"
#: Files of the product that set something of the process, and what.
ALLOWED: dict[str, set[str]] = {
    # What they set is as before when their block ends.
    f"{ENGINE}/host/process.py": {"environment", "torch", "sys"},
    f"{ENGINE}/launch/signals.py": {"signal"},
    "core/kernel/src/megatron_run/signal_bell.py": {"signal"},
    "cli/src/megatron_run_cli/termination.py": {"signal"},
    f"{ENGINE}/runtime/cuda_libraries.py": {"environment"},
    f"{ENGINE}/runtime/transformer_engine.py": {"environment"},
    f"{SUITES}/conformance/__init__.py": {"sys"},
    "plugins/observer/wandb/src/megatron_run_observer_wandb/__init__.py": {"sys"},
    # The process is theirs, from its first line to its end.
    f"{ENGINE}/launch/fork_server.py": {"environment", "signal", "sys"},
    f"{ENGINE}/launch/start.py": {"signal"},
    f"{ENGINE}/launch/watchdog/sidecar.py": {"signal"},
    f"{ENGINE}/estimate/calibration/on_ranks.py": {"environment", "torch"},
    f"{SUITES}/data/elsewhere.py": {"environment", "sys"},
    f"{SUITES}/ranks.py": {"sys", "torch"},
    "cli/src/megatron_run_cli/__main__.py": {"sys"},
    "core/sweep/src/megatron_run_sweep/child.py": {"signal"},
    "cli/src/megatron_run_cli/streams.py": {"sys"},
    "cli/src/megatron_run_cli/commands/plugins.py": {"environment"},
    "plugins/data/indexed/src/megatron_run_data_indexed/preparation/workers.py": {"environment", "signal"},
    # A module of one file is found by its name as long as it is used.
    "core/kernel/src/megatron_run/registry/importing.py": {"sys"},
    # DeepSpeed reads it when it is imported, which nothing undoes.
    "plugins/optimizer/deepspeed/src/megatron_run_optimizer_deepspeed/library.py": {"environment"},
}
#: By kind, the calls that set something of the process.
CALLS = {
    "environment": r"os\.environ\.(update|setdefault|pop|popitem|clear)|os\.(putenv|unsetenv)",
    "signal": r"signal\.(signal|set_wakeup_fd|setitimer|alarm)",
    "torch": r"torch\.(set_(?!grad_enabled|rng_state)\w+|use_deterministic_algorithms)",
    "sys": r"sys\.set\w+",
    "select": r"select\.\w+",
}
#: And what is set by assignment.
TARGETS = {
    "environment": r"os\.environ\[.*",
    "torch": r"torch\.(backends|utils\.deterministic)\..*|(kernels|deterministic)\.fill_uninitialized_memory",
    "sys": r"(sys|threading)\.\w+(\[.*)?",
}
#: The names that these begin with: other expressions need not be written out, which takes a while.
OWNERS = {"deterministic", "kernels", "os", "select", "signal", "sys", "threading", "torch", "warnings"}
FILTERS = re.compile(r"warnings\.(filterwarnings|simplefilter|resetwarnings)")


def set_by(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """What ``tree`` sets of its process, by kind, and the line."""
    excused = {call for block in ast.walk(tree) if catches(block) for call in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if first_name(node.func) not in OWNERS:
                continue
            name = ast.unparse(node.func)
            yield from ((kind, node.lineno) for kind, calls in CALLS.items() if re.fullmatch(calls, name))
            if FILTERS.fullmatch(name) and node not in excused:
                yield "warnings", node.lineno
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (("select", node.lineno) for name in names if name == "select")
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
            for target in [node.target] if isinstance(node, ast.AugAssign) else node.targets:
                for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                    text = ast.unparse(each) if first_name(each) in OWNERS else ""
                    yield from ((kind, node.lineno) for kind, name in TARGETS.items() if re.fullmatch(name, text))


def first_name(node: ast.AST) -> str:
    """``os`` of ``os.environ["A"]``; empty where another expression is first."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def catches(node: ast.AST) -> bool:
    """Whether ``node`` is a block after which the warnings filters are as before."""
    return isinstance(node, ast.With) and "catch_warnings" in " ".join(ast.unparse(each) for each in node.items)


def test_the_product_sets_nothing_of_its_process_for_good() -> None:
    found = []
    for file in SOURCES:
        name = file.relative_to(ROOT).as_posix()
        allowed = ALLOWED.get(name, set())
        kinds = list(set_by(ast.parse(file.read_text(encoding="utf-8"))))
        found += [f"{name}:{line}: {kind}" for kind, line in kinds if kind not in allowed]
        found += [f"{name} sets nothing of {kind}" for kind in allowed - {kind for kind, _ in kinds}]
    assert not found, "set it in megatron_run_engine.host.process, which gives it back"


#: Who takes any exception for a result of its own, since it is the end of a process or a thread, and why.
TAKES_ALL = {
    f"{ENGINE}/launch/worker.py": "the rank's result",
    f"{ENGINE}/launch/fork_server.py": "the process's exit code",
    f"{ENGINE}/checkpoint/async_saver.py": "raised in the main thread",
    f"{SUITES}/ranks.py": "raised in the suite's process",
}


def swallows(tree: ast.AST) -> bool:
    """Whether something in ``tree`` catches every exception, and neither raises it again nor lets a signal's go on."""
    handlers = [each for each in ast.walk(tree) if isinstance(each, ast.ExceptHandler)]
    catching = [each for each in handlers if each.type is None or "BaseException" in ast.unparse(each.type)]
    return any(not goes_on(handler.body) for handler in catching)


def goes_on(body: list[ast.stmt]) -> bool:
    """Whether a handler begins with ``let_end``, has a bare ``raise`` at its end, or one under its first ``if``."""
    ends = [body[-1], *(body[0].body[-1:] if isinstance(body[0], ast.If) else [])]
    return ast.unparse(body[0]).startswith("let_end(") or "raise" in map(ast.unparse, ends)


def test_no_signal_is_taken_for_a_failure() -> None:
    """The code of a plugin or a library that a signal has stopped is not what failed."""
    catching = ((file, source) for file in SOURCES if "except" in (source := file.read_text("utf-8")))
    found = {file.relative_to(ROOT).as_posix() for file, source in catching if swallows(ast.parse(source))}
    assert found == set(TAKES_ALL)


@pytest.mark.parametrize("handler", ["raise Named from e", "pass", "if e:\n    raise Named"])
def test_what_takes_a_signal_is_found(handler: str) -> None:
    body = "\n".join(f"    {line}" for line in handler.split("\n"))
    assert swallows(ast.parse(f"try:\n    work()\nexcept BaseException as e:\n{body}"))


def test_nobody_asks_select() -> None:
    found = []
    for file in (*TESTS, *SCRIPTS):
        source = file.read_text(encoding="utf-8")
        kinds = set_by(ast.parse(source)) if "select" in source else ()
        found += [f"{file.relative_to(ROOT)}:{line}" for kind, line in kinds if kind == "select"]
    assert not found, "use multiprocessing.connection.wait, or selectors"


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("os.environ['A'] = '1'", "environment"),
        ("del os.environ['A']", "environment"),
        ("os.environ.setdefault('A', '1')", "environment"),
        ("signal.signal(signal.SIGINT, stop)", "signal"),
        ("warnings.filterwarnings('ignore')", "warnings"),
        ("def f():\n    warnings.simplefilter('error')", "warnings"),
        ("torch.set_num_threads(1)", "torch"),
        ("torch.set_default_dtype(x)", "torch"),
        ("torch.backends.cudnn.benchmark = True", "torch"),
        ("sys.exit, sys.excepthook = leave, report", "sys"),
        ("sys.path[:0] = [folder]", "sys"),
        ("import select", "select"),
        ("from select import poll", "select"),
    ],
)
def test_what_is_set_is_found(source: str, kind: str) -> None:
    assert kind in {found for found, _ in set_by(ast.parse(source))}


@pytest.mark.parametrize(
    "source",
    [
        "with warnings.catch_warnings():\n    warnings.simplefilter('ignore')",
        "with torch.set_grad_enabled(graph):\n    run()",
        "value = os.environ['A']",
        "found = os.environ.get('A')",
    ],
)
def test_what_is_given_back_or_only_read_is_not(source: str) -> None:
    assert not [*set_by(ast.parse(source))]
