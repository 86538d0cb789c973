"""Amounts on the command line, as people write them: bytes, parameters, lengths of time."""

from __future__ import annotations

import re

import click


class Bytes(click.ParamType[float]):
    """An amount of memory."""

    name = "80GiB"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Bytes; refuses what has no unit."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([MG]i?B)", str(value))
        if match is None or not float(match[1]):
            self.fail(f"{value!r} is no amount of memory: write 80GiB", param, ctx)
        return float(match[1]) * {"MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9}[match[2]]


class Parameters(click.ParamType[float]):
    """A number of parameters."""

    name = "13B"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; refuses what has no unit."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([MBT])", str(value))
        if match is None or not float(match[1]):
            self.fail(f"{value!r} is no number of parameters: write 13B, 350M or 1T", param, ctx)
        return float(match[1]) * {"M": 1e6, "B": 1e9, "T": 1e12}[match[2]]


class Length(click.ParamType[float]):
    """A length of time, in seconds."""

    name = "10min"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds, as configurations write durations."""
        from megatron_run.contracts.quantities import Duration

        try:
            return Duration.parse(value).seconds
        except ValueError as error:
            self.fail(str(error), param, ctx)
