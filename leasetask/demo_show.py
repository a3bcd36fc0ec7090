"""What `leasetask demo` prints: a live bar on a terminal with rich, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from types import TracebackType

Row = tuple[str, str, str]
"""What, how many, and a remark."""


def open_show(total: int) -> Show:
    """Return the best display there is, a context manager; `total` is the number of tasks."""
    if sys.stdout.isatty() and find_spec("rich") is not None:
        return LiveShow(total)
    return Show(total)


class Show:
    """Plain lines: events as they come, and the count at each fifth of the way."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._fifths = 0

    def __enter__(self) -> Show:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def line(self, text: str) -> None:
        """Tell an event."""
        print(text, flush=True)

    def done(self, count: int) -> None:
        """Tell how many tasks have ended."""
        if (fifths := count * 5 // self._total) > self._fifths:
            self._fifths = fifths
            self.line(f"{count:,} of {self._total:,} done")

    def table(self, rows: Sequence[Row]) -> None:
        """Print the result."""
        print()
        for what, number, remark in rows:
            print(f"{what:<25}{number:>9}   {remark}".rstrip())
        print(flush=True)


class LiveShow(Show):
    """A bar that moves, with the events above it."""

    def __init__(self, total: int) -> None:
        from rich import progress  # noqa: PLC0415  # an extra
        from rich.console import Console  # noqa: PLC0415  # an extra

        super().__init__(total)
        self._console = Console(highlight=False, markup=False, soft_wrap=True)
        self._bar = progress.Progress(
            progress.BarColumn(bar_width=50),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Show:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def line(self, text: str) -> None:
        """Tell an event."""
        self._console.print(text)

    def done(self, count: int) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=count)

    def table(self, rows: Sequence[Row]) -> None:
        """Print the result."""
        from rich.table import Table  # noqa: PLC0415  # an extra

        table = Table(show_header=False)
        table.add_column()
        table.add_column(justify="right")
        table.add_column()
        for row in rows:
            table.add_row(*row)
        self._console.print(table)
