"""data=indexed: datasets in Megatron's .bin and .idx files.

Importing this package is instant, since ``megatron-run --help`` asks ``commands`` for what it adds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_run.errors import InputError
from megatron_run.hookspecs import hookimpl

if TYPE_CHECKING:
    from megatron_run.contracts import DataSource, PluginInfo
    from megatron_run.contracts.schema import Config
    from megatron_run_data_indexed.options import IndexedOptions

__all__ = ["IndexedOptions", "megatron_run_create_data", "megatron_run_plugin_info"]

#: Seeds of NumPy's RandomState, which shuffles for megatron-core, lie below.
_SEEDS = 2**32


def __getattr__(name: str) -> object:
    """The options, which pydantic reads: loaded when somebody asks for them."""
    if name != "IndexedOptions":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron_run_data_indexed.options import IndexedOptions

    return IndexedOptions


def check_config(config: Config, options: IndexedOptions) -> Iterator[str]:
    """Yield a notice where nothing is kept for validation.

    Raises :class:`InputError` for an option without effect, and for a seed that megatron-core could not have.
    """
    from megatron_run_engine.data import check_split

    yield from check_split(config, options)
    for name in ("samples", "cache"):
        if getattr(options, name) is not None and options.order != "megatron":
            raise InputError(f"data.{name} is for data.order=megatron", fix=f"set that too, or drop data.{name}")
    if options.packing == "documents":
        joins = [name for name in ("mask_end", "reset_positions", "reset_attention") if getattr(options, name)]
        for name in [*joins, *(["order=megatron"] if options.order == "megatron" else [])]:
            raise InputError(
                f"data.packing=documents does not go with data.{name}",
                why="that is for documents that run into each other",
                fix="drop one of the two",
            )
    if options.order == "megatron" and config.train.seed >= _SEEDS:
        raise InputError(
            f"train.seed={config.train.seed} is too large for data.order=megatron",
            why="NumPy's RandomState shuffles as it does for megatron-core, and takes 32 bits",
            fix=f"set train.seed below {_SEEDS}",
        )


@hookimpl
def megatron_run_plugin_info() -> PluginInfo:
    """Plugin indexed of kind data."""
    from megatron_run.contracts import PluginInfo
    from megatron_run_data_indexed.options import IndexedOptions

    return PluginInfo("data", "indexed", options=IndexedOptions, check_config=check_config)


@hookimpl
def megatron_run_create_data(options: IndexedOptions) -> DataSource:
    """Make the source. No file is read yet."""
    from megatron_run_data_indexed.indexed import Indexed

    return Indexed(options)
