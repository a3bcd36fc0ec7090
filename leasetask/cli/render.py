"""Tables and times for people: rich on a terminal, plain columns when piped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

_UNITS = ((1, 0.001, 0, "ms"), (120, 1, 1, "s"), (7200, 60, 0, "min"), (172800, 3600, 1, "h"))
"""Up to so many seconds: the unit's size, the digits shown, its name."""


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return rows under headers as plain columns."""
    lines = [list(headers), *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def show_table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows under headers, with rich on a terminal where it is installed."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console  # noqa: PLC0415  # an extra
            from rich.table import Table  # noqa: PLC0415  # an extra
        except ImportError:
            pass
        else:
            drawn = Table(*headers, box=None, pad_edge=False, header_style="bold")
            for row in rows:
                drawn.add_row(*(_cell(value).replace("[", r"\[") for value in row))
            Console().print(drawn)
            return
    click.echo(table(headers, rows))


@contextmanager
def progress(label: str, length: int | None = None) -> Iterator[Callable[[int], None]]:
    """Give a function that is told of each piece of work done; a bar on a terminal, else nothing."""
    hidden = not sys.stderr.isatty()
    with click.progressbar(
        length=length or 0, label=label, file=sys.stderr, hidden=hidden, show_pos=True
    ) as bar:

        def advance(steps: int) -> None:
            if length is None:
                bar.length = bar.pos + steps
            bar.update(steps)

        yield advance


def duration(seconds: float | None) -> str:
    """Return a duration in words: 350 ms, 12.3 s, 5 min, 3.2 h, 4.0 d."""
    if seconds is None:
        return "-"
    for limit, size, digits, unit in _UNITS:
        if abs(seconds) < limit:
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{seconds / 86400:.1f} d"


def due(seconds: float | None) -> str:
    """Return when something is due, in words."""
    if seconds is None:
        return "-"
    return f"in {duration(seconds)}" if seconds > 0 else f"{duration(-seconds)} ago"


def count(number: int, most: int) -> str:
    """Return a count, with a plus where counting stopped."""
    return f"{number}+" if number >= most else str(number)


def _cell(value: Any) -> str:
    return "-" if value is None else " ".join(str(value).split())
