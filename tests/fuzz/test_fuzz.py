"""A bounded run of the fuzz target; `make fuzz` offers a million inputs."""

from __future__ import annotations

import random

from fuzz import fuzz

INPUTS = 8_000


def test_no_input_gets_out() -> None:
    """Another seed each time: a failure names it."""
    counts = fuzz(INPUTS, seed=random.SystemRandom().randrange(10**6))
    assert sum(counts.values()) >= INPUTS
    assert len(counts) == 8
