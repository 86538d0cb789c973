"""The loss curves as an SVG picture, readable on a light page and on a dark one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.precision.curves import Curve

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 40, 150, 16, 34
#: Of the curves, in their order: told apart by everybody, on white and on black.
COLOURS = ("#888888", "#0072b2", "#009e73", "#d55e00")

#: From a value to where it lies in the picture.
_Scale = Callable[[float], float]


def picture(curves: Mapping[str, Curve]) -> str:
    """Loss over steps, a line a run; skipped steps are marked at the bottom."""
    everything = [loss for curve in curves.values() for loss in curve.losses]
    low, high, steps = min(everything), max(everything), len(next(iter(curves.values())).losses)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - 1) / max(1, steps - 1)

    def y(loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / max(1e-9, high - low)

    parts = [*_axes(steps, low, high, x, y)]
    for index, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[index]
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in enumerate(curve.losses, 1))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(_text(WIDTH - RIGHT + 8, TOP + 14 + 18 * index, f"{name} {curve.losses[-1]:.2f}", colour))
        marks = [step for step, skipped in enumerate(curve.skipped, 1) if skipped]
        parts += [f'<path d="M{x(step):.1f} {HEIGHT - BOTTOM}v-6" stroke="{colour}"/>' for step in marks]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
    label = f'role="img" aria-label="Loss over {steps} steps in {", ".join(curves)}"'
    return "\n".join((f'{head} font-size="12" {label}>', *parts, "</svg>", ""))


def _axes(steps: int, low: float, high: float, x: _Scale, y: _Scale) -> Iterator[str]:
    floor = HEIGHT - BOTTOM
    yield f'<path d="M{LEFT} {TOP}V{floor}H{WIDTH - RIGHT}" fill="none" stroke="#888888"/>'
    for loss in _ticks(low, high):
        yield _text(LEFT - 6, y(loss) + 4, f"{loss:g}", "#888888", "end")
    for step in (1, *range(50, steps + 1, 50)):
        yield _text(x(step), floor + 16, str(step), "#888888", "middle")
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, "step", "#888888", "middle")


def _ticks(low: float, high: float) -> Sequence[int]:
    return range(int(-(-low // 1)), int(high) + 1)


def _text(x: float, y: float, text: str, colour: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{text}</text>'
