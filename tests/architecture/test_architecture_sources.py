"""The style that a machine can check: small files and functions, no global state, no pickle."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.checkout import MEMBERS, ROOT

SOURCES = sorted(file for member in MEMBERS for file in member.modules.values())
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SCRIPTS = sorted((ROOT / "benchmarks").rglob("*.py"))

LINES_PER_FILE = 400
LINES_PER_FUNCTION = 80
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc"}
#: Names that say whose something is, or how it came, and not what it is.
IDLE_NAMES = {"told", "many", "mine", "theirs", "ours", "word"}
#: Modules that run code from the bytes they read.
UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "shelve", "marshal", "dill", "cloudpickle"}
UNSAFE_CALLS = {"torch.load", "torch.save"}
#: Pickles what it says of tensors.
UNSAFE_PACKAGE = "torch.distributed.checkpoint"
#: The one file that may use each, and why.
EXCEPTIONS = {
    # The format is a pickle by definition. It is read only after --trust-pickle, and written by torch.
    "plugins/format/distributed/src/megatron_run_format_distributed/__init__.py": {UNSAFE_PACKAGE},
    # What a suite and the ranks that it starts say to each other; multiprocessing's pickles share tensors' memory.
    "core/testing/src/megatron_run_testing/ranks.py": {"pickle"},
    # Megatron's files are pickles. Two interpreters with tables of what they may name read them, and execute nothing.
    "plugins/format/megatron/src/megatron_run_format_megatron/rank_files.py": {"pickle", "torch.load", "weights_only"},
}
#: Collectives that pickle what they are given, by their last name. The conformance suites may use them among processes
#: that they have started themselves.
PICKLING = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}


#: What attributes of interest end with.
_LAST = {*PICKLING, *(each.rpartition(".")[2] for each in (*UNSAFE_CALLS, UNSAFE_PACKAGE))}


def nodes_of(source: str) -> list[ast.AST]:
    """All nodes of ``source``, its module first: each rule goes through them, and the tree is walked once."""
    return [*ast.walk(ast.parse(source))]


def pickle_faults(nodes: Iterable[ast.AST]) -> list[str]:
    """Imports and calls among ``nodes`` that read or write pickles."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr not in _LAST:
            continue  # before it is written out, which takes a while
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Attribute) and UNSAFE_PACKAGE in dotted(node):
            found.append(UNSAFE_PACKAGE)
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {node.module.split(".")[0], *(f"{node.module}.{alias.name}" for alias in node.names)}
            found += sorted(names & (UNSAFE_MODULES | UNSAFE_CALLS))
            found += sorted({alias.name for alias in node.names} & PICKLING)
        elif isinstance(node, ast.Attribute) and (ast.unparse(node) in UNSAFE_CALLS or node.attr in PICKLING):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "weights_only"):
            found.append(node.arg)
    return found


def dotted(node: ast.Import | ast.ImportFrom | ast.Attribute) -> str:
    """What ``node`` names, with every dot, a word each."""
    if isinstance(node, ast.Attribute):
        return ast.unparse(node)
    prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    return " ".join(prefix + alias.name for alias in node.names)


def long_functions(nodes: Iterable[ast.AST]) -> list[str]:
    """Functions among ``nodes`` that are longer than the limit."""
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [node.name for node in functions if (node.end_lineno or 0) - node.lineno + 1 > LINES_PER_FUNCTION]


def bound_name(node: ast.AST) -> str:
    """The variable, parameter or function that ``node`` binds; empty if it binds none.

    Attributes are not asked: those of a network's parts are the names of its weights.
    """
    if isinstance(node, ast.Name):
        return node.id if isinstance(node.ctx, ast.Store) else ""
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        return node.name or ""
    if isinstance(node, ast.alias):
        return node.asname or ""
    return (node.rest or "") if isinstance(node, ast.MatchMapping) else ""


def idle_names(nodes: Iterable[ast.AST]) -> list[str]:
    """What ``nodes`` bind to a name of :data:`IDLE_NAMES`, or to one behind an underscore."""
    bound = ((node, bound_name(node)) for node in nodes)
    found = ((getattr(node, "lineno", 0), name) for node, name in bound if name.lstrip("_") in IDLE_NAMES)
    return [f"line {line}: say what {name!r} is" for line, name in found]


def style_faults(file: Path, nodes: Sequence[ast.AST]) -> Iterator[str]:
    """What a source does that a source must not do."""
    if not (isinstance(nodes[0], ast.Module) and ast.get_docstring(nodes[0])):
        yield "say in a docstring what the module is for"
    allowed = PICKLING if "testing" in file.parts else set()
    excepted = EXCEPTIONS.get(file.relative_to(ROOT).as_posix(), set())
    faults = [fault for fault in pickle_faults(nodes) if fault.rpartition(".")[2] not in allowed]
    yield from (fault for fault in faults if fault not in excepted)
    yield from (f"line {node.lineno}: hand state down instead" for node in nodes if isinstance(node, ast.Global))
    described = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = (ast.get_docstring(node) or "" for node in nodes if isinstance(node, described))
    yield from (f"begin with a noun or a verb: {text[:40]}" for text in texts if text.startswith("What "))


def size_faults(file: Path, nodes: Iterable[ast.AST], lines: int) -> Iterator[str]:
    """Where a file is no small room."""
    if file.stem in VAGUE:
        yield "name it for its idea"
    yield from (f"{name} is too long" for name in long_functions(nodes))
    if lines > LINES_PER_FILE:
        yield f"{lines} lines"


def test_sources_keep_the_style_and_every_file_is_a_small_room() -> None:
    """In one test: as one of each file they would be a seventh of all that every worker collects."""
    found, sources, named = [], set(SOURCES), {*SOURCES, *SCRIPTS}
    for file in (*SOURCES, *TESTS, *SCRIPTS):
        text = file.read_text(encoding="utf-8")
        nodes = nodes_of(text)
        faults = [
            *size_faults(file, nodes, len(text.splitlines())),
            *(style_faults(file, nodes) if file in sources else ()),
            *(idle_names(nodes) if file in named else ()),
        ]
        found += [f"{file.relative_to(ROOT)}: {fault}" for fault in faults]
    assert not found


def test_other_files_are_found() -> None:
    nodes = nodes_of("def f():\n    '''What it does.'''\n    global state" + LINES_PER_FUNCTION * "\n    state = 1")
    file = ROOT / "core" / "kernel" / "utils.py"
    assert len([*style_faults(file, nodes)]) == 3
    assert len([*size_faults(file, nodes, LINES_PER_FILE + 1)]) == 3


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import marshal as m",
        "from pickle import loads",
        "from torch import load",
        "def f(path):\n    return torch.load(path, weights_only=True)",
        "save = torch.save",
        "dist.gather_object(x, found)",
        "from torch.distributed import broadcast_object_list",
        "numpy.load(path, allow_pickle=True)",
        "import torch.distributed.checkpoint as dcp",
        "from torch.distributed import checkpoint",
        "from torch.distributed.checkpoint import load",
        "from torch.distributed.checkpoint.state_dict import get_state_dict",
        "torch.distributed.checkpoint.load(state)",
    ],
)
def test_pickle_is_found(source: str) -> None:
    assert pickle_faults(nodes_of(source))


@pytest.mark.parametrize("file", EXCEPTIONS)
def test_an_exception_that_nobody_needs_is_none(file: str) -> None:
    assert EXCEPTIONS[file] <= set(pickle_faults(nodes_of((ROOT / file).read_text(encoding="utf-8"))))


def test_long_function_is_found() -> None:
    body = "    x = 1\n"
    assert not long_functions(nodes_of("def f():\n" + body * (LINES_PER_FUNCTION - 1)))
    assert long_functions(nodes_of("def f():\n" + body * LINES_PER_FUNCTION)) == ["f"]


@pytest.mark.parametrize(
    "source",
    [
        "told = 1",
        "word: str",
        "for mine in ranks: pass",
        "found = [mine for mine in ranks]",
        "ours, theirs = pipe()",
        "if (many := count()): pass",
        "with open(path) as theirs: pass",
        "def read(word): pass",
        "def read(*, word=''): pass",
        "show = lambda *told: None",
        "def _told(): pass",
        "async def ours(): pass",
        "import torch as theirs",
        "try: run()\nexcept OSError as told: pass",
        "match found:\n    case [str(word), *_]: pass",
        "match found:\n    case [_, *many]: pass",
        "match found:\n    case {'a': _, **mine}: pass",
    ],
)
def test_a_name_that_says_not_what_it_holds_is_found(source: str) -> None:
    assert idle_names(nodes_of(source))


def test_a_name_that_says_what_it_holds_is_kept() -> None:
    kept = "words = [each.word for each in stack]\nself.word = embed(words, word=1)\nour_rows = their_rows = told\n"
    assert not idle_names(nodes_of(kept))
