"""What no capture could serve, refused while a run is planned, or told where it is only idle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_run.errors import InputError, plural
from megatron_run.planning.batch_size import total_steps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_run.contracts.schema import Config
    from megatron_run_engine.capture.region_capture import CaptureOptions


def check_capture(plugin: str, config: Config, options: CaptureOptions) -> Iterator[str]:
    """A plugin's ``check_config``: a notice where nothing would be captured, :class:`InputError` for what cannot be.

    That is what would never be replayed, or would end ``strict``. ``plugin`` is the name that messages give it.
    """
    _refuse_doubles(options)
    if options.strict and config.train.ramp_up is not None:
        raise InputError(
            "graph-capture.strict=true with train.ramp_up",
            why="the number of microbatches changes on the way, and each change needs another capture",
            fix="leave one of them out",
        )
    if config.train.recompute == "full":
        raise InputError(
            f"graph-capture={plugin} with train.recompute=full",
            why="a layer that is recomputed in the backward must run eagerly",
            fix="set train.recompute=none, or choose --plugin graph-capture=none",
        )
    yield from _about_the_end(config, options)


def _refuse_doubles(options: CaptureOptions) -> None:
    twice = next((name for name in options.scope if options.scope.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"graph-capture.scope names {twice} twice", fix="write each name once")


def _about_the_end(config: Config, options: CaptureOptions) -> Iterator[str]:
    """What is said of a run that ends before anything is captured: under ``strict`` that it cannot be."""
    steps, eager = total_steps(config.train), options.capture_after
    if eager < steps:
        return
    what = f"graph-capture.capture_after={eager} captures nothing"
    why = f"the run ends after {plural(steps, 'step')}, and all of them run eagerly"
    fix = f"set it below {steps}" if steps > 1 else "take more steps"
    if options.strict:
        raise InputError(what, why=why, fix=f"{fix}, or leave graph-capture.strict out")
    yield f"{what}: {why}; {fix}"
