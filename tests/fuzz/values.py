"""Random values of every kind that comes from outside, by seed: mostly odd, some harmless."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

_TEXTS = (
    "", " ", "a", "order-1", "\x00", "a\x00b", "\ud800", "\udfff\ud800", "\\u0000", "é" * 700, "x" * 3000,
    "'; drop table leasetask.task; --", "{}", "null", "NaN", "\u202e", "😀" * 50, "\n\t\r", "%s", "$1",
    "\\", '"', "compensate:x", "sleep-1", "a/b", "ﬁ", "\uffff", "\U0010ffff", "-1", "1e999",
)  # fmt: skip
_NUMBERS = (
    0, 1, -1, 2**31, -(2**31) - 1, 2**53 + 1, 2**63, -(2**63), 2**64, 10**30, 10**400, 0.1, -0.0, 1e16, 1e308,
    5e-324, float("nan"), float("inf"), float("-inf"), True, False,
)  # fmt: skip


class Opaque:
    """What nobody can encode."""

    def __repr__(self) -> str:
        raise RuntimeError("my repr raises")


class Unsayable(Exception):
    """An error that cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("my str raises")


class Values:
    """Draws values; the same seed draws the same."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def text(self) -> str:
        rng = self.rng
        if rng.random() < 0.6:
            return rng.choice(_TEXTS)
        if rng.random() < 0.5:
            return f"name-{rng.randrange(10**9)}"
        return "".join(chr(rng.randrange(0x11000)) for _ in range(rng.randrange(12)))

    def json(self, depth: int = 0) -> Any:
        """JSON and what looks like it: NUL, NaN, surrogates and huge numbers included."""
        rng, kind = self.rng, self.rng.random()
        if depth > 3 or kind < 0.45:
            return rng.choice(
                (None, self.text(), rng.choice(_NUMBERS), rng.randrange(-(10**6), 10**6))
            )
        if kind < 0.7:
            return [self.json(depth + 1) for _ in range(rng.randrange(4))]
        return {self.text(): self.json(depth + 1) for _ in range(rng.randrange(4))}

    def anything(self) -> Any:
        """JSON mostly; else what is none, or cannot end."""
        rng = self.rng
        if rng.random() < 0.8:
            return self.json()
        return rng.choice(self._oddities)()

    def error(self) -> BaseException:
        """An exception that a handler may raise."""
        return self.rng.choice(
            (Unsayable(), ValueError(self.text()), OSError(self.anything()), KeyError())
        )

    def argument(self) -> str:
        """A word of a command line: whatever execve can pass on."""
        word = self.text() if self.rng.random() < 0.7 else str(self.rng.choice(_NUMBERS))
        return word.replace("\x00", "").encode("utf-8", "replace").decode()

    @property
    def _oddities(self) -> tuple[Any, ...]:
        return (
            lambda: b"\x00\xff",
            lambda: Decimal("1.5"),
            lambda: datetime.now(UTC),
            lambda: timedelta(days=1),
            lambda: {1, 2},
            lambda: (1, 2),
            lambda: {1: "a"},
            lambda: {None: 1},
            lambda: UUID(int=5),
            Opaque,
            lambda: 1j,
            _deep,
            _endless,
            lambda: "x" * 2_000_000,
            lambda: print,
        )


def _deep() -> Any:
    value: Any = 1
    for _ in range(5_000):
        value = [value]
    return value


def _endless() -> Any:
    value: list[Any] = []
    value.append(value)
    return value
