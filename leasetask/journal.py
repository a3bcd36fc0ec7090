"""What earlier runs of a task recorded, and whether this run asks for the same.

No I/O: `Journal` is told what the row holds and answers what a verb should do. Step names are
unique within a task; the body of an unrecorded step may start only once every recorded one has been
asked for, so a changed handler is found out before anything of it runs.
"""

from __future__ import annotations

from typing import Any

from leasetask.errors import DuplicateStep, NonDeterminismError

Record = dict[str, Any]

REGISTERED = "compensate:"
"""Prefix of the record that says that a compensation is registered."""

COMPENSATED = "compensated:"
"""Prefix of the record of a compensation that has run; a replay does not ask for it."""


class Journal:
    """The records of one task, as one run goes through them."""

    def __init__(self, records: dict[str, Record], open_steps: dict[str, Record]) -> None:
        self._records = records
        self._open = open_steps
        self._asked: set[str] = set()
        self._unasked = {name for name in records if not name.startswith(COMPENSATED)}
        self._last = max((int(r["n"]) for r in records.values()), default=0)
        self._numbered: dict[str, int] = {}

    def ask(self, name: str) -> Record | None:
        """Return what is recorded under a name, None if nothing is.

        Raises:
            DuplicateStep: this run has used the name before.
        """
        if name in self._asked:
            raise DuplicateStep(
                f"the step name {name!r} is used twice; names are unique within a task "
                "(number them in a loop: f'copy-{i}')"
            )
        self._asked.add(name)
        self._unasked.discard(name)
        return self._records.get(name)

    def next_name(self, prefix: str) -> str:
        """Return the name of an unnamed sleep or wait: numbered in the order of asking."""
        self._numbered[prefix] = number = self._numbered.get(prefix, 0) + 1
        return f"{prefix}-{number}"

    def next_number(self) -> int:
        """Return the `n` of the next record."""
        self._last += 1
        return self._last

    def open_step(self, name: str) -> Record:
        """Return what is known of a step begun and not recorded."""
        return self._open.get(name, {})

    def remember(self, name: str, known: Record) -> None:
        """Keep what this run has learned of a step not recorded yet."""
        self._open[name] = known

    @property
    def complete(self) -> bool:
        """Whether all that was recorded has been asked for."""
        return not self._unasked

    def accusation(self, reached: str | None) -> NonDeterminismError:
        """Return the error for a run that stands at `reached` (None: ended) with records unasked."""
        missing = ", ".join(sorted(self._unasked, key=lambda name: int(self._records[name]["n"])))
        where = "ended" if reached is None else f"came to {reached!r}, which is not recorded,"
        return NonDeterminismError(
            f"the replay {where} without asking for the recorded {missing}: the handler has "
            "changed or is not deterministic (raise its version=, or declare a step put in "
            "between with inserted=True)"
        )

    def close(self, name: str) -> None:
        """A step has been recorded: nothing of it is open any more."""
        self._open.pop(name, None)

    def undecided(self) -> str | None:
        """Name an effect that has a compensation, was begun, and of which nobody knows how it went."""
        for name, step in self._open.items():
            if step.get("compensate") and step.get("started", 0) > step.get("settled", 0):
                return name
        return None

    def outstanding(self) -> list[str]:
        """Return the compensations registered and not run, in the order of registration."""
        names = [
            name.removeprefix(REGISTERED)
            for name, record in sorted(self._records.items(), key=lambda item: int(item[1]["n"]))
            if record.get("compensate")
        ]
        return [name for name in names if COMPENSATED + name not in self._records]
