"""What handlers note outside the database, and what holds them up until a test lets them go."""

from __future__ import annotations

import os
import time
from pathlib import Path

_LEDGER = os.environ["LEDGER"]
_FILE = os.open(_LEDGER, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def note(what: str) -> None:
    """Append a line; one write, so lines of several processes never mix."""
    os.write(_FILE, f"{time.monotonic():.4f} {os.getpid()} {what}\n".encode())


def hold(name: str) -> None:
    """Stand still until the test makes the gate's file."""
    gate = Path(f"{_LEDGER}.{name}")
    while not gate.exists():
        time.sleep(0.01)
