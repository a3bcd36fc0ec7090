"""How a worker's log lines look: text for people, JSON for machines."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

from leasetask.errors import ConfigurationError

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LEVELS = ("debug", "info", "warning", "error")
_FIELDS = ("task_id", "kind", "version", "attempt", "run", "status", "duration")
"""What leasetask's records carry beside the message; `duration` in seconds."""


def configure(level: str, format_: str) -> None:
    """Log to standard error, one line for each record, as `text` or `json`.

    Raises:
        ConfigurationError: there is no such level.
    """
    if level.lower() not in _LEVELS:
        raise ConfigurationError(f"--log-level {level} is none of {', '.join(_LEVELS)}")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if format_ == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the task's fields where there are."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)
