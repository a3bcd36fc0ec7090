"""Bars with their spread, as SVG."""

from __future__ import annotations

from html import escape
from typing import Any

_LABELS, _BARS, _ROW, _TOP = 260, 420, 24, 40
_OURS, _THEIRS, _INK = "#2a6f97", "#b8c4cc", "#222"


def bars(title: str, unit: str, cases: list[dict[str, Any]]) -> str:
    """Draw one bar for each case; the line on it goes from the lowest to the highest repetition."""
    longest = max(case["high"] for case in cases) or 1.0
    width, height = _LABELS + _BARS + 130, _TOP + _ROW * len(cases) + 12
    rows = [_bar(case, i, _BARS / longest) for i, case in enumerate(cases)]
    return "\n".join((
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13" fill="{_INK}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="12" y="22" font-size="15" font-weight="bold">{escape(title)}, {escape(unit)}</text>',
        *rows,
        "</svg>\n",
    ))  # fmt: skip


def _bar(case: dict[str, Any], row: int, scale: float) -> str:
    y = _TOP + _ROW * row
    middle = y + 8
    low, high = _LABELS + case["low"] * scale, _LABELS + case["high"] * scale
    colour = _OURS if case["subject"].startswith("leasetask") else _THEIRS
    return (
        f'<text x="{_LABELS - 8}" y="{y + 13}" text-anchor="end">{escape(case["subject"])}</text>'
        f'<rect x="{_LABELS}" y="{y}" width="{case["median"] * scale:.1f}" height="17" fill="{colour}"/>'
        f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}" stroke="{_INK}"/>'
        f'<text x="{high + 8:.1f}" y="{y + 13}">{number(case["median"])}</text>'
    )


def number(value: float) -> str:
    """Write a number with three digits that mean something."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
