"""What the Python adapters share. Only the standard library: each has an environment of its own."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

DSN = os.environ["BENCH_DSN"]
_FILE = os.open(os.environ["BENCH_MARKS"], os.O_WRONLY | os.O_APPEND)
_seen: set[str] = set()


def note(word: str, number: int) -> None:
    """Note that something happens now."""
    os.write(_FILE, f"{word} {number} {time.monotonic():.6f}\n".encode())


def first(word: str = "first") -> None:
    """Note it the first time only."""
    if word not in _seen:
        _seen.add(word)
        note(word, 0)


def step(number: int, total: int) -> None:
    """Note the ends of the stretches of a long task that are compared."""
    if number in (0, 100, total - 100, total):
        note(f"step-{number - total if number > 100 else number}", number)


def inputs(kind: str, n: str) -> list[int]:
    """Return the tasks' inputs: a long task is one, of n steps."""
    return [int(n)] if kind == "long" else list(range(int(n)))


def run(commands: dict[str, Callable[..., Any]]) -> None:
    """Run the command that this process was asked for and print its answer."""
    name, *arguments = sys.argv[1:]
    answer = commands[name](*arguments)
    print(json.dumps(answer))


def timed(call: Callable[[], Any]) -> float:
    """Return how many seconds a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def paced(n: int, seconds: float, call: Callable[[int], Any]) -> list[float]:
    """Call with 0 … n − 1, so many seconds apart; return when each call began."""
    began = []
    for i in range(n):
        time.sleep(seconds)
        began.append(time.monotonic())
        call(i)
    return began
