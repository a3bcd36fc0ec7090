"""Tells in words what went wrong under a schedule, why, and what would mend it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leasetask.testing.faults import Played

ENGINE_ERRORS = frozenset(
    {"NonDeterminismError", "DuplicateStep", "ConcurrentWait", "SuspensionSwallowed"}
)
"""Errors of a replay: the handler is at fault whatever the check says."""

RECONCILE = " (reconcile)"


def tell(played: Played, schedule: str) -> str:
    """Return the report: what happened, what is wrong, how to see it again, how to mend it."""
    lines = [f"{played.outcome.kind} does not survive this:"]
    lines += [f"  {line}" for line in _story(played)]
    lines += [f"  {played.failure}", f"mend: {_mend(played)}"]
    if schedule:
        lines.append(f'see it again: crash_anywhere(…, only="{schedule}")')
    return "\n".join(lines)


def _story(played: Played) -> list[str]:
    if not played.schedule:
        return ["nothing: it is wrong undisturbed"]
    lines = []
    workers = iter(zip("ABCDEFGH", played.points, strict=False))
    for fault in played.schedule:
        if fault.kind == "silence":
            lines.append("no signal came, so its waits timed out")
            continue
        name, points = next(workers, ("?", []))
        if fault.point >= len(points):
            continue
        where = _where(points, fault.point)
        lines.append(
            {
                "crash": f"worker {name} died {where}",
                "zombie": f"worker {name} froze {where}, lost its lease to another, and went on",
                "cancel": f"a cancel was asked for {where}",
                "double": f"it was enqueued, and its signals sent, once more {where}",
            }[fault.kind]
        )
    return lines + [f"the body of {name!r} ran {n} times" for name, n in _repeated(played)]


def _where(points: list[str], index: int) -> str:
    """Name a point by its own words and, after a body, by what had not happened yet."""
    here = points[index]
    if here.startswith("after the body of") and index + 1 < len(points):
        return f"{here} and {points[index + 1]}"
    return here


def _repeated(played: Played) -> list[tuple[str, int]]:
    return [(n, c) for n, c in played.bodies.items() if c > 1 and not n.endswith(RECONCILE)]


def _mend(played: Played) -> str:
    failure = played.failure or ""
    kinds = {fault.kind for fault in played.schedule}
    for sign, advice in (
        ("DuplicateStep", "give each step of the task a name of its own (number them in loops)"),
        ("ConcurrentWait", "let one wait follow the other"),
        ("SuspensionSwallowed", "let BaseException pass around waits, and use no verbs in finally"),
        (
            "NonDeterminismError",
            "let the handler do the same on every run: what differs between runs (time, random "
            "numbers, the outside) belongs into a step; after a change of the code raise version=",
        ),
        ("caught TaskCanceled", "let TaskCanceled and CancelledError pass"),
        ("never ended", "give the wait a timeout=, or see who sends its signal"),
    ):
        if sign in failure:
            return advice
    if not kinds:
        return "the handler itself, or the check: no fault was needed"
    if "silence" in kinds:
        return "look at what the handler does after a SignalTimeout: it goes on as if all were well"
    if "cancel" in kinds and not _repeated(played):
        return "register what undoes each step: ctx.step(…, compensate=…), and see what it undoes"
    return _mend_repetition(played)


def _mend_repetition(played: Played) -> str:
    repeated = [name for name, _ in _repeated(played)]
    effects = {
        p.rsplit("the start of ", 1)[1] for w in played.points for p in w if "the start of" in p
    }
    for name in repeated:
        if name not in effects:
            return (
                f"step {name!r} runs again when its record was not committed: make it a "
                "ctx.effect (with a reconcile that looks), a ctx.transaction (for a write in this "
                "database), or hand an idempotency key outside"
            )
    if repeated:
        if any(fault.kind == "zombie" for fault in played.schedule):
            return (
                f"effect {repeated[0]!r} was going on in two processes: hand attempt.key to the "
                "outside, no engine can stop a frozen process that wakes inside"
            )
        return f"the reconcile of effect {repeated[0]!r} said NotDone of what had happened"
    return (
        "no body ran twice, so what is doubled happens outside of the steps, which every replay "
        "runs again: put it into a step"
    )
