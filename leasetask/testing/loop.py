"""An event loop in which one worker can be stopped, with all its tasks, as a process is stopped.

SIGSTOP and SIGKILL stop every branch of an async handler at the same instant, and a body in the
middle of an `await` with them. So whatever belongs to a worker passes its switch before it runs.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVarTuple

from leasetask.run import current_run

Ts = TypeVarTuple("Ts")


class Switch:
    """Stops what one worker has in the loop: each callback is held back, in order, until it thaws."""

    def __init__(self) -> None:
        self.frozen = False
        self._held: list[tuple[Callable[..., Any], tuple[Any, ...], Context]] = []

    def freeze(self) -> None:
        """Let nothing of this worker run any more."""
        self.frozen = True

    def thaw(self, loop: Loop) -> None:
        """Let it go on where it stood; called in the loop."""
        self.frozen = False
        held, self._held = self._held, []
        for callback, args, context in held:
            loop.call_soon(callback, *args, context=context)

    def hold(self, callback: Callable[..., Any], args: tuple[Any, ...], context: Context) -> None:
        """Keep a callback back."""
        self._held.append((callback, args, context))


switch_here: ContextVar[Switch | None] = ContextVar("leasetask_switch", default=None)
"""The switch of the worker that a coroutine belongs to."""


class Loop(asyncio.SelectorEventLoop):
    """asyncio's own loop, but that each callback looks at its worker's switch first."""

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """As asyncio's."""
        own = copy_context() if context is None else context
        return super().call_soon(self._pass, callback, args, own, context=own)

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """As asyncio's."""
        own = copy_context() if context is None else context
        return super().call_soon_threadsafe(self._pass, callback, args, own, context=own)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """As asyncio's; `call_later` comes by here."""
        own = copy_context() if context is None else context
        return super().call_at(when, self._pass, callback, args, own, context=own)

    def _pass(self, callback: Callable[..., Any], args: tuple[Any, ...], context: Context) -> None:
        switch = _switch_of(context)
        if switch is not None and switch.frozen:
            switch.hold(callback, args, context)
        else:
            callback(*args)


def _switch_of(context: Context) -> Switch | None:
    """A handler's thread has no context of its worker's, but one of its run's."""
    run = context.get(current_run)
    return context.get(switch_here) if run is None else getattr(run, "switch", None)


class _Grave(threading.Thread):
    """Keeps what crashed alive: collected, its coroutines would be unwound and run their `finally`.

    On the stack of a thread that never ends, so that the interpreter's own end leaves it alone.
    """

    def __init__(self) -> None:
        super().__init__(name="leasetask-crashed", daemon=True)
        self._arrivals: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run(self) -> None:
        """Take what comes, for ever."""
        kept = []
        while True:
            kept.append(self._arrivals.get())

    def add(self, *crashed: Any) -> None:
        """Keep these."""
        self._arrivals.put(crashed)


_lock = threading.Lock()
_grave: _Grave | None = None


def bury(*crashed: Any) -> None:
    """Keep what crashed for as long as the process lives."""
    global _grave  # noqa: PLW0603  # one for the process, made by the first crash
    with _lock:
        if _grave is None:
            _grave = _Grave()
            _grave.start()
        _grave.add(*crashed)
