"""Writes bench/README.md, the results page, and its plots, from a results file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import plot
from bench.floor import BATCHED
from bench.goals import Figures, Goal, goals
from bench.results import FOLDER

PAGE = Path(__file__).parent / "README.md"

TITLES = {
    "drain": (
        "Drain of no-op tasks, one worker process",
        "From the first handler's start until nothing is left.",
    ),
    "steps": (
        "1,000 tasks of 10 steps",
        "Each step's result is committed before the next one starts.",
    ),
    "long task": (
        "Steps of a single task, one after another",
        "No other task to share a commit with.",
    ),
    "enqueue one by one": ("Enqueue, one by one", "One connection, a commit each."),
    "enqueue many": (
        "Enqueue, many at once",
        "By each engine's own call for it, or a loop where it has none.",
    ),
    "pick-up": (
        "Pick-up",
        "From the call of enqueue to the handler's start, in an idle worker: p50.",
    ),
    "signal wake": (
        "Signal wake",
        "From the call that signals to the waiting handler's going on: p50.",
    ),
    "recovery": ("Recovery after kill -9", "From the kill to the task's start in another worker."),
    "backlog": ("Backlog", "Drain among rows that nobody can run now, of mixed priorities."),
    "snapshot": (
        "A snapshot held open",
        "Drain while another session holds a snapshot from before.",
    ),
    "processes": ("Worker processes", "Drain by several processes on the same two cores."),
    "business": (
        "The user's own commits",
        "Transactions/s with an enqueue in each, workers busy, as a share of those whose enqueue never notifies.",
    ),
    "idle worker": ("An idle worker", "What it costs to have nothing to do."),
    "floor": (
        "The raw floor",
        "No engine: single statements on leasetask's own table and indexes; the best number of connections.",
    ),
}
_COSTS = {
    "wal_bytes": "WAL B", "statements": "statements", "rows": "row versions", "hot_share": "HOT",
    "toast_rows": "TOAST rows", "client_us": "client CPU µs", "server_us": "server CPU µs",
}  # fmt: skip


def newest() -> Path:
    """Return the newest results, of a full run if there is one."""
    found = sorted(FOLDER.glob("*-full.json")) or sorted(FOLDER.glob("*-quick.json"))
    if not found:
        raise SystemExit("bench: no results yet; run `python -m bench quick`")
    return found[-1]


def write(file: Path) -> None:
    """Write the page and its plots."""
    results = json.loads(file.read_text())
    PAGE.write_text("\n".join(_lines(results, Figures(results), file)) + "\n")
    print(PAGE)


def _lines(results: dict[str, Any], figures: Figures, file: Path) -> Iterator[str]:
    yield "# Benchmark"
    yield ""
    yield from _how(results, file)
    yield from _verdict(list(goals(figures)))
    yield (Path(__file__).parent / "reasons.md").read_text()
    for workload, (title, text) in TITLES.items():
        if cases := figures.of(workload):
            yield from _workload(workload, title, text, cases, figures, file)
    yield from _engines(results, figures)


def _how(results: dict[str, Any], file: Path) -> Iterator[str]:
    machine, server = results["machine"], results["server"]
    settings = ", ".join(f"`{name}={value}`" for name, value in server["settings"].items())
    yield (
        "Written by `python -m bench page`; do not edit. `make bench-quick` runs leasetask alone in "
        "under three minutes, `make bench` everything, each engine in an environment of its own."
    )
    yield ""
    yield f"- Run: {results['mode']}, {results['at']}, [all figures](results/{file.name})."
    yield (
        f"- Machine: {machine['cores']} cores of {machine['cpu']} for server and clients together, "
        f"Linux {machine['system']}, Python {machine['python']}."
    )
    yield f"- Server: PostgreSQL {server['version']} ({server['origin']}), {settings}."
    yield (
        "- Medians, and in brackets the lowest and highest repetition; repetitions of all cases are "
        "interleaved. Costs are per unit; CPU of what ended before it could be read is left out. A ratio within this page counts, a figure alone does not."
    )
    yield ""


def _verdict(found: list[Goal]) -> Iterator[str]:
    for reached, title in ((True, "What we are good at"), (False, "What we are bad at")):
        chosen = [goal for goal in found if goal.reached == reached]
        yield f"## {title}"
        yield ""
        yield f"Goals {'reached' if reached else 'not reached'} in this run: {len(chosen)} of {len(found)}."
        yield ""
        if chosen:
            yield "| goal | wanted | measured |"
            yield "| --- | ---: | ---: |"
        for goal in chosen:
            sign = "≤" if goal.at_most else "≥"
            yield f"| {goal.text} | {sign} {goal.bound:g} | {plot.number(goal.measured)} |"
        yield ""


def _workload(
    workload: str, title: str, text: str, cases: list[dict[str, Any]], figures: Figures, file: Path
) -> Iterator[str]:
    unit = cases[0]["unit"]
    yield f"## {title}"
    yield ""
    yield text
    yield ""
    if len(cases) > 1:
        image = FOLDER / f"{file.stem}-{workload.replace(' ', '-')}.svg"
        same_unit = [case for case in cases if case["unit"] == unit]
        image.write_text(plot.bars(title, unit, same_unit))
        yield f"![{title}](results/{image.name})"
        yield ""
    details = sorted({name for case in cases for name in case["detail"]})
    costs = [name for name in _COSTS if any(name in case["costs"] for case in cases)]
    floors = any("floor" in case for case in cases)
    head = [
        "",
        unit,
        *(["of the floor"] if floors else []),
        *(d.replace("_", " ") for d in details),
        *(_COSTS[c] for c in costs),
    ]
    yield "| " + " | ".join(head) + " |"
    yield "| --- |" + " ---: |" * (len(head) - 1)
    for case in cases:
        spread = f"{plot.number(case['median'])} ({plot.number(case['low'])} – {plot.number(case['high'])})"
        of_floor = [_of_floor(case, figures)] if floors else []
        row = [case["subject"], spread, *of_floor]
        row += [_shown(case["detail"].get(name)) for name in details]
        row += [_shown(case["costs"].get(name)) for name in costs]
        yield "| " + " | ".join(row) + " |"
    yield ""


def _of_floor(case: dict[str, Any], figures: Figures) -> str:
    floor = figures.median("floor", case.get("floor", ""))
    return f"{case['median'] / floor:.2f} ×" if floor else ""


def _shown(value: float | None) -> str:
    return "" if value is None else plot.number(value)


def _engines(results: dict[str, Any], figures: Figures) -> Iterator[str]:
    yield "## The engines, and what each promises"
    yield ""
    yield "Unlike things are not ranked as if they were alike: a queue that deletes done jobs and fences nothing does less."
    yield ""
    yield "| engine | versions | settings | fenced? | history kept? | steps? | recovery after a crash |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, engine in results["engines"].items():
        contract = engine["contract"]
        promises = " | ".join(contract[key] for key in ("fenced", "history", "steps", "recovery"))
        yield f"| {name} | {engine['versions']} | {engine['settings']} | {promises} |"
    yield ""
    for name, engine in results["engines"].items():
        yield from _detuned(name, engine["reference"], figures)
    for name, reason in results["skipped"].items():
        yield f"- {name} was left out: {reason}."
    for case in results["cases"]:
        if "error" in case:
            yield f"- {case['workload']} of {case['subject']} failed: {case['error'][:300]}"


_REFERENCE_FLOOR = 31_400
"""The batched floor of the machine on which the references were measured."""


def _detuned(name: str, reference: dict[str, float], figures: Figures) -> Iterator[str]:
    """A peer that reaches far less here than it can is detuned, and its comparison void."""
    floor = figures.median("floor", BATCHED)
    for workload, expected in reference.items():
        measured = figures.median(workload, name)
        if floor and measured is not None and measured < 0.8 * expected * floor / _REFERENCE_FLOOR:
            scaled = expected * floor / _REFERENCE_FLOOR
            yield (
                f"- {name}, {workload}: {plot.number(measured)} here, {plot.number(scaled)} expected on "
                "a machine with this floor: it is detuned, and the comparison with it void."
            )
