"""A few of each of the soak's faults; `make soak` has the many."""

from __future__ import annotations

from soak import PER_MINUTE, soak

SECONDS = 14.0


def test_a_short_soak_loses_and_doubles_nothing() -> None:
    """Fourteen seconds in which every kind of fault comes at least once."""
    often = dict.fromkeys(PER_MINUTE, 60 / SECONDS * 1.6) | {"kill -9": 60.0}
    report = soak(SECONDS, seed=8, most=often)
    print(report)
    assert set(report.faults) == set(PER_MINUTE)
    assert report.tasks > 100
    assert report.passed, str(report)
