"""Tells in words what went wrong under a schedule, why, and what would mend it."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from leasetask.testing.probe import Hit, Point

if TYPE_CHECKING:
    from leasetask.testing.faults import Played

ENGINE_ERRORS = frozenset(
    {"NonDeterminismError", "DuplicateStep", "ConcurrentWait", "SuspensionSwallowed"}
)
"""Errors of a replay: the handler is at fault whatever the check says."""

_LONGEST = 12
"""Lines of an assertion's message."""


def tell(
    played: Played, undisturbed: Played, schedule: str, innocent: frozenset[Point] = frozenset()
) -> str:
    """Return the report: what happened, what is wrong, how to mend it, how to see it again.

    Args:
        innocent: bodies that ran twice elsewhere, and no harm came of it.
    """
    lines = [f"{played.outcome.kind} does not survive this:"]
    lines += [f"  {line}" for line in _story(played, undisturbed)]
    lines += [f"  {line}" for line in _wrong(played)]
    lines.append(f"mend: {_Cause(played, undisturbed, innocent).mend()}")
    if schedule:
        lines.append(f'see it again: crash_anywhere(…, only="{schedule}")')
    return "\n".join(lines)


def where(points: Sequence[Point], index: int) -> str:
    """Name a point by its own words and, after a body, by what had not happened yet."""
    if not 0 <= index < len(points):
        return "before its first point"
    here = points[index]
    if here.when == "after" and here.part in ("body", "compensation"):
        return f"{here} returned and before its checkpoint"
    return str(here)


def doubled(played: Played, undisturbed: Played) -> frozenset[Point]:
    """Return those of them that also ran to their end more than once."""
    ended = Counter(event.point for event in played.log.events)
    return frozenset(
        body
        for body in repeated(played, undisturbed)
        if ended[Point("after", body.part, body.step)] > 1
    )


def assertion(failed: AssertionError) -> str:
    """Return what an assertion says, or else how it reads."""
    if str(failed):
        return str(failed)
    frames = traceback.extract_tb(failed.__traceback__)
    return (frames[-1].line if frames else None) or "an assertion failed"


def repeated(played: Played, undisturbed: Played) -> list[Point]:
    """Return the bodies that began more often than undisturbed, `reconcile` apart: it may."""
    usual = undisturbed.log.bodies
    return [
        body
        for body, count in played.log.bodies.items()
        if count > max(1, usual[body]) and body.part != "reconcile"
    ]


# --- what happened -----------------------------------------------------------------------------


def _story(played: Played, undisturbed: Played) -> Iterator[str]:
    if not played.schedule:
        yield "nothing: it is wrong undisturbed"
    if any(fault.kind == "silence" for fault in played.schedule):
        waits = _timed_out(played)
        yield f"no signal came, so {', '.join(map(repr, waits)) or 'its waits'} timed out"
    for hit in played.log.hits:
        yield _told(hit, where(_points_of(played, hit.worker), hit.place))
    woken = {hit.worker for hit in played.log.hits if hit.fault.kind == "zombie"}
    for body in repeated(played, undisturbed):
        workers = [event.worker for event in played.log.events if event.point == body]
        for worker in dict.fromkeys(workers[1:]):
            name = f"{worker}, awake again," if worker in woken else worker
            yield f"{name} ran {str(body).removeprefix('in ')} again"


def _told(hit: Hit, place: str) -> str:
    return {
        "crash": f"{hit.worker} died {place}",
        "zombie": f"{hit.worker} froze {place}, and lost its lease",
        "wake": f"the frozen worker woke when {hit.worker} was {place}",
        "cut": f"the connection of {hit.worker} was lost {place}, and it committed once more",
        "cancel": f"a cancel was asked for when {hit.worker} was {place}",
        "double": f"when {hit.worker} was {place} the task was enqueued, and its signals sent, "
        "once more",
    }[hit.fault.kind]


def _wrong(played: Played) -> Iterator[str]:
    first, *more = str(played.failure).splitlines()
    yield first
    yield from (f"  {line}" for line in more[:_LONGEST])
    error = played.outcome.last_error
    if (
        played.outcome.status in ("failed", "dead")
        and error
        and str(error["type"]) not in str(played.failure)
    ):
        yield f"the task is {played.outcome.status}: {error['type']}: {error['message']}"
    if played.world_then is not None:
        yield f"the world then: {played.world_then}"


def _points_of(played: Played, worker: str) -> list[Point]:
    """Return a worker's points; the last letter of its name is its place."""
    return played.points["ABCDEFGHIJKLMNOPQRSTUVWXYZ".index(worker[-1])]


def _timed_out(played: Played) -> list[str]:
    """Return the waits at which the task stood, none of which had its signal."""
    stands = [e.point.step for e in played.log.events if e.point.part == "wait"]
    return list(dict.fromkeys(stands))


# --- why, and what would mend it ---------------------------------------------------------------


class _Cause:
    """Looks for what made the check fail; the surest signs first."""

    def __init__(self, played: Played, undisturbed: Played, innocent: frozenset[Point]) -> None:
        self._played = played
        self._undisturbed = undisturbed
        self._failure = played.failure or ""
        self._log = played.log
        self._verbs = undisturbed.log.verbs | played.log.verbs
        self._kinds = {hit.fault.kind for hit in played.log.hits}
        again = repeated(played, undisturbed)
        guilty = [body for body in again if body not in innocent]
        surely = [body for body in guilty if body in doubled(played, undisturbed)]
        self._repeated = surely or guilty or again

    def mend(self) -> str:
        """Return the advice."""
        for look in (
            self._refused,
            self._stuck,
            self._undisturbed_already,
            self._timeout_ignored,
            self._out_of_budget,
            self._late_bound,
            self._after_compensation,
            self._ran_again,
            self._reconcile_lied,
            self._raised_on_replay,
            self._cancel_and_crash,
            self._cancel,
            self._double,
            self._after_complete,
        ):
            advice = look()
            if advice is not None:
                return advice
        return (
            "no body ran twice, so it is what the handler does outside of its steps: every replay "
            "does that again. Put it into a step (or an effect, if it must not happen twice), and "
            "return from it what later code needs"
        )

    # --- what the engine itself refuses ----------------------------------------------------------

    def _refused(self) -> str | None:
        for sign, advice in _SIGNS:
            if sign in self._failure:
                return advice
        return None

    def _stuck(self) -> str | None:
        if self._played.hung is not None:
            return (
                "something that a dead or frozen worker still holds: a lock, a file, a transaction "
                "of the handler's own (ctx.transaction lets go by itself); or a body without end"
            )
        if "never ended" not in self._failure:
            return None
        if self._played.endless:
            return "its waits time out and begin anew, for ever: bound them, or let check() pass"
        return "give the wait a timeout=, or see who sends its signal"

    # --- what no fault explains, or one alone ------------------------------------------------------

    def _undisturbed_already(self) -> str | None:
        if self._log.hits or any(f.kind == "silence" for f in self._played.schedule):
            return None
        return "the handler itself, or the check: no fault was needed"

    def _timeout_ignored(self) -> str | None:
        if all(fault.kind != "silence" for fault in self._played.schedule):
            return None
        waits = ", ".join(map(repr, _timed_out(self._played)))
        return (
            f"look at what the handler does after the SignalTimeout of {waits}: it goes on as if "
            "the signal had come"
        )

    def _out_of_budget(self) -> str | None:
        outcome = self._played.outcome
        if outcome.status == "dead":
            return "a crash spends an attempt: give the task more, retry=Retry(max_attempts=…)"
        if (outcome.last_error or {}).get("type") == "DeadlineExceeded":
            return (
                "after a crash the lease has to run out before another worker goes on: the "
                "deadline must leave time for that"
            )
        return None

    def _late_bound(self) -> str | None:
        if not self._log.late_bound:
            return None
        names = ", ".join(map(repr, self._log.late_bound))
        variables = ", ".join(map(repr, dict.fromkeys(self._log.late_bound.values())))
        return (
            f"the compensations {names} look at the variable {variables} when they run, and by "
            "then it has changed: hand its value over, ctx.compensate(name, function, value)"
        )

    def _after_compensation(self) -> str | None:
        undone = False
        for _, point in self._log.events:
            undone = undone or point.part == "compensation"
            if undone and "zombie" in self._kinds and (point.when, point.part) == ("in", "body"):
                return (
                    f"the body of {point.step!r} ran in a frozen process that woke after the "
                    "compensations had run: no engine can stop that, so let the outside refuse "
                    "what comes after the undoing"
                )
        return None

    # --- what ran again --------------------------------------------------------------------------

    def _ran_again(self) -> str | None:
        for body in self._repeated:
            verb = "compensation" if body.part == "compensation" else self._verbs.get(body.step)
            if verb not in ("effect", "wait_for"):
                return _AGAIN[verb or "step"].format(body.step)
        for body in self._repeated:
            if self._verbs.get(body.step) == "wait_for":
                return _AGAIN["wait_for"].format(body.step)
        for body in self._repeated:
            return self._effect_again(body.step)
        return None

    def _effect_again(self, step: str) -> str:
        if self._overlapped(step):
            return (
                f"effect {step!r} was going on in two processes, and its reconcile was asked "
                "before the first had got there: no engine can stop a frozen process that wakes "
                "inside, so hand attempt.key to the outside"
            )
        return f"the reconcile of effect {step!r} said NotDone of what had happened: look better"

    def _overlapped(self, step: str) -> bool:
        """Whether no `reconcile` that said NotDone could have found a `do` that had ended."""
        ended, could_find = 0, False
        for _, point in self._log.events:
            if point == Point("after", "body", step):
                ended += 1
            elif point == Point("in", "reconcile", step):
                could_find = ended > 0
            elif point == Point("in", "body", step) and could_find:
                return False
        return True

    def _reconcile_lied(self) -> str | None:
        for body in self._log.bodies:
            if body.part == "reconcile" and not self._log.bodies[Point("in", "body", body.step)]:
                error = (self._played.outcome.last_error or {}).get("type")
                if error == "EffectUnknown":
                    return (
                        f"the reconcile of effect {body.step!r} cannot tell what happened, so the "
                        "task awaits a person: look better, or let the check allow for it"
                    )
                return (
                    f"the reconcile of effect {body.step!r} said Done of what had not happened: "
                    "its do never ran"
                )
        return None

    # --- the rest --------------------------------------------------------------------------------

    def _raised_on_replay(self) -> str | None:
        error = self._played.outcome.last_error or {}
        if self._played.outcome.status != "failed" or "cancel" in self._kinds:
            return None
        if error.get("type") in ("EffectUnknown", "StepFailed"):
            return None
        return (
            f"the handler raised {error.get('type')} when it was replayed. A replay does not run "
            "the bodies of recorded steps: what they left in memory is not there, only what they "
            "returned; and what the handler does outside of steps it does again"
        )

    def _cancel_and_crash(self) -> str | None:
        if "cancel" not in self._kinds or not self._kinds & {"crash", "zombie"}:
            return None
        seen = {event.point for event in self._log.events}
        for body in self._log.bodies:
            recorded = Point("after", "checkpoint", body.step) in seen
            if body.part == "body" and not recorded and self._verbs.get(body.step) is None:
                return (
                    f"step {body.step!r} had run, its record, and the compensation with it, was "
                    "not committed, and after a cancel no step runs again: register before, with "
                    "ctx.compensate, or as a ctx.effect(…, compensate=…), whose start is committed"
                )
        return None

    def _cancel(self) -> str | None:
        if "cancel" not in self._kinds:
            return None
        if self._played.outcome.status == "canceled" and "succeeded" in self._failure:
            return (
                "a canceled task does not succeed: let the check allow for "
                'outcome.status == "canceled", or leave "cancel" out of faults='
            )
        undone = [b.step for b in self._log.bodies if b.part == "compensation"]
        done = [b.step for b in self._log.bodies if b.part == "body" and b.step not in undone]
        names, undoings = (", ".join(map(repr, found)) for found in (done, undone))
        how = "ctx.step(…, compensate=…), or ctx.effect(…, compensate=…)"
        if not undone:
            return (
                f"nothing undid {names}: register it with the step, {how}, so that no cancel "
                "falls in between"
            )
        also = f", and whether {names} must be undone too: {how}" if done else ""
        return f"see what the compensations {undoings} undo{also}"

    def _double(self) -> str | None:
        if "double" not in self._kinds:
            return None
        return (
            "a signal came twice: give it something to tell it by (an id in the payload, a topic "
            "of its own), or look in your database with ctx.wait_for"
        )

    def _after_complete(self) -> str | None:
        last = self._played.points[0][-1:] if self._played.points else []
        if last != [Point("after", "transaction", "complete")]:
            return None
        return (
            "what follows ctx.complete never runs after a crash: the task has ended. Do it before, "
            "in a step"
        )


_SIGNS = (
    ("DuplicateStep", "give each step of the task a name of its own (number them in loops)"),
    ("ConcurrentWait", "let one wait follow the other"),
    ("SuspensionSwallowed", "let BaseException pass around waits, and use no verbs in finally"),
    (
        "with other arguments",
        "what differs from run to run (time, random numbers, the outside) is worked out outside of "
        "a step: work it out in one, and pass its result on",
    ),
    (
        "NonDeterminismError",
        "let the handler do the same on every run: what differs between runs (time, random "
        "numbers, the outside) belongs into a step; after a change of the code raise version=",
    ),
    ("told of the cancel", "let TaskCanceled and CancelledError pass: clean up and raise again"),
)

_AGAIN = {
    "step": "step {!r} runs again when its record was not committed: make it a ctx.effect (with a "
    "reconcile that looks), a ctx.transaction (for a write in this database), a ctx.enqueue (for "
    "another task), or hand an idempotency key outside",
    "transaction": "transaction {!r} was rolled back and ran again, and what its function did "
    "outside of the transaction stayed: move that into a ctx.effect",
    "wait_for": "the check of wait_for {!r} is asked again and again: it may only look",
    "compensation": "compensation {!r} runs again when its record was not committed: let it look "
    "whether there is still something to undo",
}
