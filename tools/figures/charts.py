"""Small charts as SVG: bars, and lines. The same records give the same bytes, so that a test can compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import ceil, floor, log10

COLOURS = ("#2f7d5b", "#d9822b", "#3b6fb6", "#a8476b", "#8a6fc4", "#5f9ea0", "#b0a04a", "#7a828c")
TEXT, GRID = "#7a828c", "#7a828c40"
WIDTH = 720

Points = Sequence[tuple[float, float]]


def bars(title: str, rows: Sequence[tuple[str, float, str]], shown: Callable[[float], str], left: int = 118) -> str:
    """Horizontal bars, each with its name, value and colour."""
    most = max(value for _, value, _ in rows)
    drawn = []
    for place, (name, value, colour) in enumerate(rows):
        y = 40 + 44 * place
        length = max(3.0, (WIDTH - left - 82) * value / most)
        drawn.append(
            f'<text x="{left - 10}" y="{y + 19}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{left}" y="{y}" width="{length:.1f}" height="28" rx="3" fill="{colour}"/>'
            f'<text x="{left + 8 + length:.1f}" y="{y + 19}" font-weight="bold">{shown(value)}</text>'
        )
    told = ", ".join(f"{name}: {shown(value)}" for name, value, _ in rows)
    return _whole(title, told, 52 + 44 * len(rows), [f'<text x="{left}" y="22">{escape(title)}</text>', *drawn])


def lines(
    title: str,
    across: str,
    up: str,
    series: Mapping[str, Points],
    *,
    log_x: bool = False,
    log_y: bool = False,
    shown: Callable[[float], str] = "{:,g}".format,
) -> str:
    """Lines through points, one for each series, with a legend at the right."""
    place_x = _axis([x for points in series.values() for x, _ in points], 70, 500, log_x)
    place_y = _axis([y for points in series.values() for _, y in points], 300, 50, log_y)
    drawn = [
        f'<text x="70" y="22">{escape(title)}</text>',
        f'<text x="285" y="350" text-anchor="middle">{escape(across)}</text>',
    ]
    drawn.append(f'<text x="70" y="42" font-size="12">{escape(up)}</text>')
    for tick, y in place_y[1]:
        drawn.append(f'<line x1="70" x2="500" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>')
        drawn.append(f'<text x="62" y="{y + 4:.1f}" text-anchor="end" font-size="12">{shown(tick)}</text>')
    for tick, x in place_x[1]:
        drawn.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="300" y2="305" stroke="{TEXT}"/>')
        drawn.append(f'<text x="{x:.1f}" y="322" text-anchor="middle" font-size="12">{shown(tick)}</text>')
    for number, (name, points) in enumerate(series.items()):
        drawn += _series(name, [(place_x[0](x), place_y[0](y)) for x, y in points], number)
    return _whole(title, f"{up} by {across}: {', '.join(series)}", 366, drawn)


def _series(name: str, places: Points, number: int) -> list[str]:
    colour, y = COLOURS[number % len(COLOURS)], 60 + 24 * number
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in places)
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>{"".join(dots)}',
        f'<rect x="516" y="{y - 10}" width="12" height="12" rx="2" fill="{colour}"/>'
        f'<text x="534" y="{y}" font-size="13">{escape(name)}</text>',
    ]


def _axis(
    values: Sequence[float], first: float, last: float, log: bool
) -> tuple[Callable[[float], float], list[tuple[float, float]]]:
    """Where a value is drawn between two places, and the ticks with their places."""
    ticks = _powers(values) if log else _steps(max(values))
    low, high = (log10(ticks[0]), log10(ticks[-1])) if log else (ticks[0], ticks[-1])

    def place(value: float) -> float:
        return first + (last - first) * ((log10(value) if log else value) - low) / (high - low)

    return place, [(tick, place(tick)) for tick in ticks]


def _powers(values: Sequence[float]) -> list[float]:
    """Ones, twos and fives of each power of ten around the values; of many powers, the powers alone."""
    low, high = min(values), max(values)
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    parts = (1, 2, 5) if len(powers) < 5 else (1,)
    ticks = [round(part * 10.0**power, 12) for power in powers for part in parts]
    below = max((tick for tick in ticks if tick <= low), default=ticks[0])
    above = min((tick for tick in ticks if tick >= high and tick > below), default=ticks[-1])
    return [tick for tick in ticks if below <= tick <= above]


def _steps(most: float) -> list[float]:
    """About five even steps from nothing to a bit above the most."""
    power = 10.0 ** floor(log10(most / 4))
    step = next(part * power for part in (1, 2, 2.5, 5, 10) if part * power * 5 >= most)
    return [round(step * number, 12) for number in range(ceil(most / step) + 1)]


def _whole(title: str, told: str, height: int, drawn: Sequence[str]) -> str:
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(f"{title}. {told}")}" font-family="system-ui, sans-serif" font-size="15" fill="{TEXT}">',
        *drawn,
        "</svg>",
        "",
    ])
