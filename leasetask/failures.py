"""What is recorded of an exception, whatever it does when it is looked at."""

from __future__ import annotations

import traceback
from datetime import UTC, datetime
from typing import Any

from leasetask.payload import printable


def describe(error: BaseException, attempt: int) -> dict[str, Any]:
    """Return an exception as a task's `last_error` and a failed step's record hold it."""
    return {
        "type": printable(type(error).__qualname__, 200),
        "message": message_of(error),
        "traceback": traceback_of(error),
        "attempt": attempt,
        "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }


def message_of(error: BaseException) -> str:
    """Return the text of an exception, also of one whose `str()` raises."""
    try:
        return printable(str(error))
    except Exception as broken:
        return f"<its text cannot be had: {type(broken).__name__}>"


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an exception as Python prints it, cut in its middle when long."""
    try:
        return printable("".join(traceback.format_exception(error)))
    except Exception:
        return printable("".join(traceback.format_tb(error.__traceback__)))
