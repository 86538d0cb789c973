"""The page of what was measured: a table a piece, beside the goals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.gpu.experts import GROUPED
from benchmarks.gpu.host import BEHIND
from benchmarks.gpu.models import CAPTURES, GPT, NANOGPT, OURS, PEERS, WAYS
from benchmarks.moe.peers.dense import NAME as DENSE
from benchmarks.support.report import table

FP8 = tuple(name for name in WAYS if "FP8" in name)
BF16 = tuple(name for name in WAYS if name not in FP8)
#: At least: share of the data sheet's peak, at these sizes; rate over the best peer's; graphs over eager; a layer of
#: experts over a dense one; FP8 over bf16 at the largest.
MFU, MFU_AT, PEER, GRAPHS, EXPERTS, FP8_GAIN = 0.56, ("1.3b", "3b"), 1.02, 1.10, 0.85, 1.25
#: At most: memory over nanoGPT's at the smallest; what a save behind the training takes from 100 steps.
MEMORY, STALL = 1.10, 0.02
#: How far what is planned may lie from what is measured, eagerly, at each size.
PLANNED = {"tokens/s": 0.10, "GiB": 0.03}


def page(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Markdown of the pieces in ``found``, by name; pieces that were not measured are named at the end."""
    yield "# One GPU\n"
    yield "Made by `python -m benchmarks.gpu`: device events, medians, random data.\n"
    yield from sorted({f"{piece['machine']}." for piece in found.values()})
    ceilings = found.get("ceilings", {})
    if ceilings:
        yield f"\n## Ceilings of {ceilings.get('name', 'the device')}\n"
        numbers = {key: value for key, value in ceilings.items() if "/s" in key}
        yield from table(tuple(numbers) or ("failed",), [_numbers(numbers) or (ceilings["failed"],)])
    for size in GPT:
        if size in found:
            yield from _model(size, found[size], ceilings)
    for size, captured in found.get("graphs", {}).items():
        if isinstance(captured, dict):
            yield f"\n## Graphs: {size}\n\n{captured['shape']}.\n"
            yield from table(("capture", "tokens/s", "over eager"), _captured(captured["sides"]))
    if "kernels" in found:
        yield "\n## Kernels\n"
        yield from _kernels(found["kernels"])
    for name in ("planner", "experts", "profile", "saves", "start"):
        if name in found:
            yield f"\n## {name.capitalize()}\n"
            yield from _plain({key: value for key, value in found[name].items() if key not in ("machine", "took")})
    yield "\n## Goals\n"
    yield from table(("goal", "measured", "met"), _goals(found))


def _numbers(values: Mapping[str, float]) -> tuple[str, ...]:
    return tuple(f"{value:.3g}" for value in values.values())


def _model(size: str, found: Mapping[str, Any], ceilings: Mapping[str, Any]) -> Iterator[str]:
    yield f"\n## GPT {size} in bf16\n\n{found['shape']}.\n"
    measured = ceilings.get("bf16 TFLOP/s")
    columns = ("side", "tokens/s", "TFLOP/s", "of measured peak", "of data sheet", "GiB", "last loss")
    rows = []
    for name, side in found["sides"].items():
        if "failed" in side:
            rows.append((name, side["failed"], *[""] * 5))
            continue
        shares = (f"{side['TFLOP/s'] / peak:.1%}" if peak else "unknown" for peak in (measured, side["sheet"]))
        memory = "unknown" if side["GiB"] is None else f"{side['GiB']:.1f}"
        rows.append((name, f"{side['tokens/s']:.0f}", f"{side['TFLOP/s']:.3g}", *shares, memory, f"{side['loss']:.2f}"))
    yield from table(columns, rows)


def _captured(sides: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    eager = sides["eager"].get("tokens/s")
    for name in filter(sides.__contains__, CAPTURES):
        rate = sides[name].get("tokens/s")
        if rate is None:
            yield name, sides[name]["failed"], ""
        else:
            yield name, f"{rate:.0f}", f"{rate / eager:.2f}" if eager else "unknown"


def _kernels(found: Mapping[str, Any]) -> Iterator[str]:
    """A row a kernel, with a column a number; whatever else the piece holds follows."""
    rows = {name: numbers for name, numbers in found.items() if isinstance(numbers, dict)}
    columns = tuple(dict.fromkeys(column for numbers in rows.values() for column in numbers))
    if rows:
        shown = (
            (name, *(f"{numbers[each]:.3g}" if numbers[each] is not None else "" for each in columns))
            for name, numbers in rows.items()
        )
        yield from table(("kernel", *columns), shown)
        yield ""
    rest = {key: value for key, value in found.items() if key not in rows and key not in ("machine", "took")}
    yield from _plain(rest)


def _plain(found: Mapping[str, Any]) -> Iterator[str]:
    """Whatever a piece holds, a row a number."""
    yield from table(("what", "value"), _flat("", found))


def _flat(prefix: str, found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in found.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(f"{name}: ", value)
        else:
            yield name, f"{value:.3g}" if isinstance(value, float) else str(value)


def _goals(found: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """Each goal with what was measured; one whose pieces are missing is not measured."""
    for size in MFU_AT:
        rate, sheet = (_most(found, size, what, *BF16) for what in ("TFLOP/s", "sheet"))
        yield _goal(f"{MFU:.0%} of the data sheet at {size}", _over(rate, sheet), MFU)
    for size in GPT:
        own, best = _most(found, size, "tokens/s", *BF16), _most(found, size, "tokens/s", *PEERS)
        yield _goal(f"{PEER:.2f} of the best peer's rate at {size}", _over(own, best), PEER)
    sides = found.get("graphs", {}).get("experts", {}).get("sides", {})
    eager, replayed = (sides.get(name, {}).get("tokens/s") for name in ("eager", "partial"))
    yield _goal(f"partial graphs {GRAPHS:.2f} times eager at experts", _over(replayed, eager), GRAPHS)
    bf16, fp8 = (_most(found, "3b", "tokens/s", *names) for names in (BF16, FP8))
    yield _goal(f"FP8 {FP8_GAIN:.2f} times bf16 at 3b", _over(fp8, bf16), FP8_GAIN)
    layer = found.get("experts", {})
    yield _goal(
        f"a layer of experts {EXPERTS:.2f} of a dense one's rate", _over(layer.get(DENSE), layer.get(GROUPED)), EXPERTS
    )
    own, peer = _most(found, "124m", "GiB", *BF16), _most(found, "124m", "GiB", NANOGPT)
    yield _goal(f"at most {MEMORY:.2f} of nanoGPT's memory at 124m", _over(own, peer), MEMORY, least=False)
    saved = found.get("saves", {}).get(BEHIND, {})
    stall = _over(saved.get("lost ms"), 100 * saved.get("step ms", 0.0))
    yield _goal(f"at most {STALL:.0%} of 100 steps lost to a save", stall, STALL, least=False)
    for size in GPT:
        eager = found.get(size, {}).get("sides", {}).get(OURS, {})
        for what, bound in PLANNED.items():
            ratio = _over(found.get("planner", {}).get(size, {}).get(what), eager.get(what))
            error = None if ratio is None else abs(ratio - 1)
            yield _goal(f"{what} planned within {bound:.0%} at {size}", error, bound, least=False)


def _most(found: Mapping[str, Mapping[str, Any]], size: str, what: str, *names: str) -> float | None:
    """The most of ``names``; None when none was measured."""
    sides = found.get(size, {}).get("sides", {})
    return max((sides[name][what] for name in names if sides.get(name, {}).get(what) is not None), default=None)


def _over(measured: float | None, other: float | None) -> float | None:
    """Their ratio; None where one of them was not measured."""
    return measured / other if measured is not None and other else None


def _goal(what: str, measured: float | None, bound: float, *, least: bool = True) -> tuple[str, str, str]:
    if measured is None:
        return what, "not measured", ""
    return what, f"{measured:.3f}", "yes" if (measured >= bound if least else measured <= bound) else "no"
