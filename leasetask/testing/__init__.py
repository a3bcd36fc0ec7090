"""Prove that handlers survive a crash at any point, on a real PostgreSQL.

`crash_anywhere` tries every point; `Engine` moves time and runs what is due; the pytest plugin gives
fixtures for both.
"""

from leasetask.history import History, replay
from leasetask.testing.engine import Engine
from leasetask.testing.faults import (
    DoesNotSurvive,
    Played,
    Scenario,
    Survived,
    crash_anywhere,
)
from leasetask.testing.schedule import Fault, Schedule

__all__ = [
    "DoesNotSurvive",
    "Engine",
    "Fault",
    "History",
    "Played",
    "Scenario",
    "Schedule",
    "Survived",
    "crash_anywhere",
    "replay",
]
