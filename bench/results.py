"""Runs cases, interleaved, and keeps their results as JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from bench.engine import AdapterFailed, Engine
from bench.lab import Case, Sample
from bench.server import SETTINGS, Server

FOLDER = Path(__file__).parent / "results"


@dataclass
class Outcome:
    """A case's samples, or why there are none."""

    case: Case
    samples: list[Sample] = field(default_factory=list)
    error: str | None = None


def run(cases: Sequence[Case], repetitions: int) -> list[Outcome]:
    """Run every case once, then every case again, …: what disturbs the machine disturbs all."""
    outcomes = [Outcome(case) for case in cases]
    for repetition in range(repetitions):
        for outcome in outcomes:
            if outcome.error is None and repetition < (outcome.case.times or repetitions):
                _once(outcome, repetition)
    return outcomes


def _once(outcome: Outcome, repetition: int) -> None:
    case = outcome.case
    began = time.monotonic()
    try:
        sample = case.run()
    except (AdapterFailed, TimeoutError) as error:
        outcome.error = " ".join(str(error).split())
        print(
            f"{repetition + 1} {case.workload} · {case.subject}: {outcome.error}", file=sys.stderr
        )
        return
    outcome.samples.append(sample)
    more = ", ".join(f"{name} {value:.3g}" for name, value in sample.detail.items())
    print(
        f"{repetition + 1} {case.workload} · {case.subject}: {sample.value:,.5g} {case.unit}"
        f"{'; ' + more if more else ''} ({time.monotonic() - began:.1f} s)",
        flush=True,
    )


def as_json(
    outcomes: Sequence[Outcome],
    server: Server,
    mode: str,
    engines: dict[str, dict[str, Any]],
    skipped: dict[str, str],
) -> dict[str, Any]:
    """Return a run's results as they are kept."""
    return {
        "mode": mode,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "server": {"version": server.version, "origin": server.origin, "settings": SETTINGS},
        "engines": engines,
        "skipped": skipped,
        "cases": [_case(outcome) for outcome in outcomes],
    }


def save(results: dict[str, Any]) -> Path:
    """Write results under their date."""
    FOLDER.mkdir(exist_ok=True)
    stamp = results["at"][:16].replace(":", "").replace("-", "")
    file = FOLDER / f"{stamp}-{results['mode']}.json"
    file.write_text(json.dumps(results, indent=1) + "\n")
    return file


def describe(engine: Engine, versions: str) -> dict[str, Any]:
    """Return what is kept of an engine."""
    return {
        "versions": versions,
        "settings": engine.settings,
        "contract": vars(engine.contract),
        "reference": engine.reference,
    }


def _case(outcome: Outcome) -> dict[str, Any]:
    case = outcome.case
    kept: dict[str, Any] = {"workload": case.workload, "subject": case.subject, "unit": case.unit}
    if case.floor is not None:
        kept["floor"] = case.floor
    if outcome.error is not None:
        return kept | {"error": outcome.error}
    values = [sample.value for sample in outcome.samples]
    return kept | {
        "median": median(values),
        "low": min(values),
        "high": max(values),
        "values": values,
        "costs": _medians([sample.costs for sample in outcome.samples]),
        "detail": _medians([sample.detail for sample in outcome.samples]),
    }


def _medians(samples: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(median(s[key] for s in samples), 4) for key in samples[0]}


def _machine() -> dict[str, Any]:
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return {
        "cores": os.cpu_count(),
        "cpu": cpu,
        "system": platform.release(),
        "python": platform.python_version(),
    }
