"""The types of options that several sources of data have, and plugins may use."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Protocol

from pydantic import AfterValidator, BeforeValidator

from megatron_run.contracts.data import Split

if TYPE_CHECKING:
    from megatron_run.contracts.schema import Config


def _at_commas(value: object) -> object:
    return tuple(value.split(",")) if isinstance(value, str) else value


def _shares(value: tuple[float, float, float]) -> tuple[float, float, float]:
    if not all(isfinite(share) and share >= 0 for share in value) or not value[0]:
        raise ValueError("data.split is three shares, as 90,5,5 for train, validation and test; train is above 0")
    return value


#: A list that the command line writes with commas.
AT_COMMAS = BeforeValidator(_at_commas)
#: Files, folders and patterns; one may be written alone. It is not cut at commas, which names may have.
Paths = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
#: How much of the data train, validation and test get, in any unit.
SplitShares = Annotated[tuple[float, float, float], AT_COMMAS, AfterValidator(_shares)]
#: In the order of their shares.
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class HasSplit(Protocol):
    """Options with the key ``data.split``."""

    @property
    def split(self) -> SplitShares:
        """The shares."""


def check_split(config: Config, options: HasSplit) -> Iterator[str]:  # noqa: ARG001  # as PluginInfo.check_config
    """A notice where nothing is kept for validation."""
    if not options.split[SPLITS.index("validation")]:
        yield "data.split gives validation nothing: nothing is evaluated"
