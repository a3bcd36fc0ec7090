"""The asyncio tasks of one async handler, and whether all of them stand.

A branch is any task that inherited the handler's context. It stands when it is parked at a wait or
a failed step, when it is held before an unrecorded step's body, or when it only awaits branches.
When all stand, the run is over: suspended, or, with recorded steps that nobody asked for, accused.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Literal, TypeVar

from leasetask.errors import ReplayError
from leasetask.operations import in_body
from leasetask.run import Run, current_run

T = TypeVar("T")

_LOCKS = {asyncio.locks.__file__, asyncio.queues.__file__}

_LOOK_AGAIN = (0.001, 0.25)
"""Seconds, first and longest, between looks at a branch that awaits something of its own."""


def task_factory(
    loop: asyncio.AbstractEventLoop,
    coroutine: Generator[Any, None, T] | Coroutine[Any, Any, T],
    **kwargs: Any,
) -> asyncio.Task[T]:
    """Make a task and, where a handler's context is inherited, count it as that run's branch."""
    task: asyncio.Task[T] = asyncio.Task(coroutine, loop=loop, **kwargs)
    context = kwargs.get("context")
    run = current_run.get() if context is None else context.get(current_run)
    # A body's own tasks cannot use verbs, and may be meant to live on, as a client's connection does.
    if in_body.get() if context is None else context.get(in_body):
        return task
    if run is not None and isinstance(run.branches, Branches):
        run.branches.add(task)
    return task


class Branches:
    """The branches of one run; `root` is the handler's own task, which a verdict cancels."""

    def __init__(self, run: Run, root: asyncio.Task[Any]) -> None:
        self._run = run
        self._root = root
        self._tasks: set[asyncio.Task[Any]] = {root}
        self._standing: set[asyncio.Task[Any]] = set()
        self._gates: list[tuple[str, asyncio.Future[None]]] = []
        self._look: asyncio.TimerHandle | None = None
        self._pause = _LOOK_AGAIN[0]
        self.verdict: Literal["suspend"] | ReplayError | None = None

    def add(self, task: asyncio.Task[Any]) -> None:
        """Count a task that the handler has started."""
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def gate(self, name: str) -> None:
        """Hold this branch until every recorded step has been asked for."""
        opened: asyncio.Future[None] = self._run.loop.create_future()
        self._gates.append((name, opened))
        await self._stand_until(opened)

    async def stand(self) -> None:
        """Park this branch for good."""
        await self._stand_until(self._run.loop.create_future())

    async def _stand_until(self, future: asyncio.Future[None]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._standing.add(task)
        self._look_soon(0)
        try:
            await future
        finally:
            self._standing.discard(task)

    def others(self) -> list[asyncio.Task[Any]]:
        """Return the branches still alive besides the root."""
        return [task for task in self._tasks if task is not self._root and not task.done()]

    def close(self) -> None:
        """Stop looking."""
        if self._look is not None:
            self._look.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if self._standing:
            self._look_soon(0)

    def _look_soon(self, delay: float) -> None:
        if self._look is not None:
            self._look.cancel()
        self._look = self._run.loop.call_later(delay, self._judge)

    def _judge(self) -> None:
        self._look = None
        if self.verdict is not None or not self._standing:
            return
        if self._run.journal.complete and self._gates:
            for _, opened in self._gates:
                if not opened.done():
                    opened.set_result(None)
            self._gates.clear()
            return
        if not all(self._stands(task) for task in self._tasks if not task.done()):
            self._pause = min(self._pause * 2, _LOOK_AGAIN[1])
            self._look_soon(self._pause)
            return
        self.verdict = self._run.journal.accusation(self._gates[0][0]) if self._gates else "suspend"
        self._run.unwound = True
        self._root.cancel()

    def _stands(self, task: asyncio.Task[Any]) -> bool:
        if task in self._standing:
            return True
        awaited = getattr(task, "_fut_waiter", None)
        if awaited is not None and self._is_woken_by_branches(awaited):
            return True
        # A lock that a parked branch holds is not released before the next run. Not beside a gate:
        # a replay that is held up there is no proof of a changed handler.
        return not self._gates and _waits_for_a_lock(task)

    def _is_woken_by_branches(self, awaited: asyncio.Future[Any]) -> bool:
        if awaited in self._tasks:
            return True
        children = getattr(awaited, "_children", None)
        if children is not None:
            return all(child.done() or self._is_woken_by_branches(child) for child in children)
        return any(
            _wakes(callback, awaited)
            for task in self._tasks
            for callback, _ in getattr(task, "_callbacks", None) or ()
        )


def _waits_for_a_lock(task: asyncio.Task[Any]) -> bool:
    """Whether a task is inside asyncio's own Lock, Semaphore, Event, Condition or Queue."""
    inner: Any = task.get_coro()
    while (deeper := getattr(inner, "cr_await", None)) is not None and hasattr(deeper, "cr_code"):
        inner = deeper
    code = getattr(inner, "cr_code", None)
    return code is not None and code.co_filename in _LOCKS


def _wakes(callback: Callable[..., Any], awaited: asyncio.Future[Any]) -> bool:
    """Whether a task's done-callback ends this future, as asyncio's own helpers do it.

    TaskGroup keeps the future it awaits on itself, wait_for passes it to a partial, and wait and
    shield close over it.
    """
    if isinstance(callback, functools.partial):
        return awaited in callback.args
    owner = getattr(callback, "__self__", None)
    if owner is not None and getattr(owner, "_on_completed_fut", None) is awaited:
        return True
    cells = getattr(callback, "__closure__", None) or ()
    return any(cell.cell_contents is awaited for cell in cells)
