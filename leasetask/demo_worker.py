"""The App that the demo's workers run: the example's handler, every step body noted in a ledger.

The ledger is no part of the engine. It lies outside the database, so that a body that ran twice
shows there whatever the engine believes.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from leasetask.app import App
from leasetask.context import Context
from leasetask.demo_ingest import Ingested, Media, ingest
from leasetask.demo_ingest import app as example

KIND = "LEASETASK_DEMO_KIND"
LEDGER = "LEASETASK_DEMO_LEDGER"
PAUSE = "LEASETASK_DEMO_PAUSE"
"""Environment variables by which the demo tells its workers what to do."""

END = "end"
"""Noted when the handler has returned."""

T = TypeVar("T")

_ledger = os.open(os.environ.get(LEDGER, os.devnull), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
_pause = float(os.environ.get(PAUSE, "0"))
app = App()


class NotingContext(Context):
    """A context that notes each step body before it runs."""

    def step(self, name: str, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """As `Context.step`."""
        return super().step(name, self._noted(name, function, _pause), *args, **options)

    def transaction(self, name: str, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """As `Context.transaction`."""
        return super().transaction(name, self._noted(name, function, 0), *args, **options)

    def effect(
        self, name: str, do: Callable[..., T], reconcile: Callable[..., Any], **options: Any
    ) -> T:
        """As `Context.effect`."""
        return super().effect(name, self._noted(name, do, _pause), reconcile, **options)

    def _noted(self, name: str, function: Callable[..., T], pause: float) -> Callable[..., T]:
        @functools.wraps(function)  # keeps the annotations, by which results are converted
        def body(*args: Any) -> T:
            note(self.task_id, name)
            time.sleep(pause)
            return function(*args)

        return body


@app.task(kind=os.environ.get(KIND, "leasetask_demo"), retry=example.registry.resolve(ingest).retry)
def noted_ingest(ctx: Context, media: Media) -> Ingested:
    """Run the example's handler with each step body noted."""
    result = ingest(NotingContext(ctx._run), media)
    note(ctx.task_id, END)
    return result


def note(task_id: str, step: str) -> None:
    """Append a line to the ledger; one write, so that lines of several processes do not mix."""
    os.write(_ledger, f"{task_id} {step}\n".encode())


def _end_with_the_demo() -> None:
    """Our standard input is a pipe from the demo: it ends when the demo does, however that ends."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if KIND in os.environ:
    threading.Thread(target=_end_with_the_demo, daemon=True).start()
