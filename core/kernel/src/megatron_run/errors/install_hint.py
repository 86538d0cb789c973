"""How to install what is missing: the engine, another distribution of this project, or the libraries of an extra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from shlex import quote

from megatron_run.errors import EngineMissingError, PluginError

#: The distribution that brings torch, and the modules that come with it.
ENGINE = "megatron-run-engine"
ENGINE_MODULES = frozenset(
    {"jinja2", "megatron_run_engine", "numpy", "rich", "safetensors", "tokenizers", "torch", "xxhash"}
)


def check_engine(cause: BaseException, what: str, origin: str = "") -> None:
    """Raise :class:`EngineMissingError` with ``what`` when ``cause`` is the failed import of a module of the engine.

    So it is where a name that is loaded when it is asked for has raised that error first (:mod:`megatron_run.lazy`).
    """
    if isinstance(cause, EngineMissingError) and cause.__cause__:
        cause = cause.__cause__
    missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
    if missing and missing.partition(".")[0] in ENGINE_MODULES:
        why = f"it needs the engine, and there is no module {missing!r}"
        raise EngineMissingError(what, why=why, origin=origin, fix=f"type: {how_to_install(ENGINE)}") from cause


def check_installed(cause: BaseException, what: str) -> None:
    """Raise as :func:`check_engine`, and :class:`PluginError` for a package of any other distribution of this project.

    The import package ``megatron_run_planner`` comes with the distribution ``megatron-run-planner``, and so each.
    """
    check_engine(cause, what)
    package = (cause.name or "").partition(".")[0] if isinstance(cause, ModuleNotFoundError) else ""
    if package.startswith("megatron_run_"):
        fix = f"type: {how_to_install(package.replace('_', '-'))}"
        raise PluginError(what, why=f"there is no module {package!r}", fix=fix) from cause


def how_to_install(distribution: str, kernel: Path = Path(__file__)) -> str:
    """The command that brings a first-party ``distribution``; ``kernel`` is a module of the kernel that runs.

    A kernel of a checkout asks for the checkout's other folders: no index may have that version. Of two folders the
    engine's comes first, since pip looks on the index for what a plugin needs and does not find installed.
    """
    root = checkout(kernel)
    members = _members(root) if root else iter(())
    folder = next((each for each in members if root and _distribution_of(each, root) == distribution), None)
    if root is None or folder is None:
        return f"pip install {distribution}"
    folders = [folder]
    needs_it = distribution != ENGINE and f'"{ENGINE}' in (folder / "pyproject.toml").read_text(encoding="utf-8")
    if needs_it and find_spec("megatron_run_engine") is None:
        folders.insert(0, root / "core/engine")
    here = Path.cwd() == root  # pip takes a path for one only with a leading ./ or /
    paths = [f"./{each.relative_to(root)}" if here else quote(str(each)) for each in folders]
    how = "-e " if _runs_from_checkout(kernel) else ""  # as the kernel was installed
    return f"pip install {' '.join(f'{how}{path}' for path in paths)}"


def how_to_add(distribution: str, extra: str, options: str = "") -> str:
    """The command that brings what ``extra`` of a ``distribution`` asks for, by the names that the index has.

    ``options`` are pip's. Without the distribution, it brings that. Where its metadata name nothing for the extra,
    as those of an older version, pip is left to find out.
    """
    from importlib.metadata import PackageNotFoundError, requires

    try:
        asked = [line.partition(";") for line in requires(distribution) or ()]
    except PackageNotFoundError:
        return how_to_install(distribution)
    wanted = (f"extra == '{extra}'", f'extra == "{extra}"')
    names = [quote(name.strip()) for name, _, condition in asked if condition.strip() in wanted]
    return " ".join(("pip install", *filter(None, [options]), *(names or [quote(f"{distribution}[{extra}]")])))


def checkout(kernel: Path = Path(__file__)) -> Path | None:
    """The checkout whose kernel runs, from there or as a copy that pip made.

    None for a kernel from an index, or of a checkout that is gone. Of a folder that it installs pip keeps the address: https://peps.python.org/pep-0610/.
    """
    import json
    from urllib.parse import unquote, urlsplit

    source = kernel.resolve().parents[1]
    if _runs_from_checkout(kernel):
        return source.parents[3]
    for file in source.parent.glob("megatron_run_core-*.dist-info/direct_url.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            folder = Path(unquote(urlsplit(str(json.loads(file.read_text(encoding="utf-8"))["url"])).path))
            if folder.match("core/kernel") and (folder / "pyproject.toml").is_file():
                return folder.parents[1]
    return None


def _runs_from_checkout(kernel: Path) -> bool:
    return kernel.resolve().parents[1].match("core/kernel/src/megatron_run")


def _members(root: Path) -> Iterator[Path]:
    """The folders of a checkout that hold a distribution."""
    for pattern in ("core/*/pyproject.toml", "cli/pyproject.toml", "plugins/*/*/pyproject.toml"):
        yield from (file.parent for file in sorted(root.glob(pattern)))


def _distribution_of(folder: Path, root: Path) -> str:
    """``plugins/schedule/gpipe`` -> ``megatron-run-schedule-gpipe``."""
    names = folder.relative_to(root).parts
    return "-".join(("megatron-run", *(names[1:] if len(names) > 1 else names)))
