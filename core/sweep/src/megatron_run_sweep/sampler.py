"""Values drawn by Optuna: each from the seed, the number of the run and what earlier runs came to.

The study is made anew for every draw, from the record and the runs' own files. So a sweep that was killed draws what it
would have drawn, and no second journal can disagree with the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_run.errors import PluginError
from megatron_run.errors.install_hint import how_to_add
from megatron_run_sweep.axes import Axis

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

#: Values of an earlier run, and its metric; None where it has none, as after a failure.
Earlier = tuple[Mapping[str, str], float | None]


def check_optuna() -> None:
    """Raise :class:`PluginError` where Optuna is not installed."""
    try:
        import optuna  # noqa: F401
    except ModuleNotFoundError as error:
        raise PluginError(
            "--sampler optuna needs Optuna",
            why=f"there is no module {error.name!r}",
            fix=f"type: {how_to_add('megatron-run-sweep', 'optuna')}",
        ) from None


def draw(axes: Sequence[Axis], seed: int, earlier: Sequence[Earlier], *, maximize: bool) -> dict[str, str]:
    """The values of the run after ``earlier``, by Optuna's tree-structured Parzen estimator (Bergstra et al. 2011)."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    spaces = {axis.key: _space(axis) for axis in axes}
    study = optuna.create_study(
        direction="maximize" if maximize else "minimize",
        sampler=optuna.samplers.TPESampler(seed=(seed + len(earlier)) % 2**32),
    )
    study.add_trials([_trial(values, metric, spaces) for values, metric in earlier])
    drawn = study.ask(spaces).params
    return {axis.key: _text(drawn[axis.key], axis) for axis in axes}


def _space(axis: Axis) -> BaseDistribution:
    """Where the values of ``axis`` lie."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if axis.values or axis.range is None:
        return CategoricalDistribution(axis.values)
    if axis.range.whole:
        return IntDistribution(int(axis.range.low), int(axis.range.high), log=axis.range.log)
    return FloatDistribution(float(axis.range.low), float(axis.range.high), log=axis.range.log)


def _trial(values: Mapping[str, str], metric: float | None, spaces: Mapping[str, BaseDistribution]) -> FrozenTrial:
    from optuna.distributions import CategoricalDistribution, IntDistribution
    from optuna.trial import TrialState, create_trial

    def read(key: str, space: BaseDistribution) -> Any:
        if isinstance(space, CategoricalDistribution):
            return values[key]
        return int(values[key]) if isinstance(space, IntDistribution) else float(values[key])

    params = {key: read(key, space) for key, space in spaces.items()}
    if metric is None:
        return create_trial(state=TrialState.FAIL, params=params, distributions=dict(spaces))
    return create_trial(value=metric, params=params, distributions=dict(spaces))


def _text(value: object, axis: Axis) -> str:
    """As ``--set`` takes it: of a number between the ends of a range four digits, with which it is trained."""
    if not isinstance(value, float) or axis.range is None:
        return str(value)
    short = float(f"{value:.4g}")
    return repr(min(max(short, float(axis.range.low)), float(axis.range.high)))
