"""The workloads that only leasetask runs."""
from __future__ import annotations
from bench.lab import Case, Lab


def cases(lab: Lab) -> list[Case]:
    return []
