"""Threads for sync handlers: daemons, so one that never returns cannot keep a process alive."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Threads:
    """A pool that grows as needed; a thread that a handler never leaves is simply lost to it."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._started = 0

    def submit(self, work: Callable[[], None]) -> None:
        """Run `work`, which must not raise, in a free thread or a new one."""
        with self._lock:
            if self._idle > 0:
                self._idle -= 1
            else:
                self._started += 1
                name = f"leasetask-handler-{self._started}"
                threading.Thread(target=self._serve, name=name, daemon=True).start()
        self._work.put(work)

    def close(self) -> None:
        """Let the threads end once they are free."""
        with self._lock:
            for _ in range(self._started):
                self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            with self._lock:
                self._idle += 1
