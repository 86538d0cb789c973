"""``python -m megatron_run_cli``, which is also what torchrun starts, and the program ``megatron-run``."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType

from megatron_run_cli import RANK_VARIABLES

with suppress(FileNotFoundError):  # the current folder was removed
    if __name__ == "__main__" and not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:  # noqa: PTH109  # as -m has it
        del sys.path[0]  # a torch.py that lies in the current folder is not torch

# Most of what a command imports and makes stays to its end. A rank of torchrun or srun keeps Python's pace.
if RANK_VARIABLES.isdisjoint(os.environ):
    gc.set_threshold(50_000, 10, 100)

from megatron_run.errors import ExitCode
from megatron_run_cli.main import main
from megatron_run_cli.output import tell_error
from megatron_run_cli.streams import erase, flush_output, full_disk, open_streams
from megatron_run_cli.termination import signals_kept


class BeforeTorch:
    """Prepares this process for its computations at the last moment, when torch is loaded, if it is at all.

    OpenMP and torch read their variables when they are loaded. Local ranks find theirs when they start.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, _target: object = None) -> ModuleSpec | None:
        """The others' finding of torch, with a loader that prepares the process first; None for anything else."""
        if name != "torch":
            return None
        others = (finder.find_spec(name, path) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(_load_prepared, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _load_prepared(load: Callable[[ModuleType], None], module: ModuleType) -> None:
    with suppress(ModuleNotFoundError):  # without the engine
        from megatron_run_engine.host.rank_environment import prepare_process

        prepare_process(os.environ)
    with signals_kept():
        load(module)


def program() -> None:
    """Run the command line and end the process with its exit code.

    A process that was a rank ends at once: while Python takes itself down, a communicator whose peer is already gone
    may abort it, and so turn a run that succeeded into one that failed.
    """
    open_streams()
    sys.meta_path.insert(0, BeforeTorch())
    code = main()
    erase()
    failed = flush_output()
    if failed is not None and not code and not isinstance(failed, BrokenPipeError):  # else nobody reads any more
        tell_error(str(full_disk(failed) or failed))
        code = ExitCode.DATA
    if "torch.distributed" in sys.modules:
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    program()
