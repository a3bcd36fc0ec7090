"""What an App can run: each (kind, version) with its handler, types and policy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from leasetask.errors import ConfigurationError, UnknownKind
from leasetask.model import LONGEST, Retry
from leasetask.payload import annotation_of, name_in_a_line
from leasetask.protocol import KindPolicy


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """One declared handler.

    Attributes:
        accepts: older versions whose tasks this code can run too.
        lease, timeout, deadline: seconds; None: the worker's lease, no limit, no limit.
        input_type, result_type: the annotations, `Any` when there are none.
    """

    name: str
    version: int
    accepts: tuple[int, ...]
    handler: Callable[..., Any]
    is_async: bool
    takes_input: bool
    input_type: Any
    result_type: Any
    retry: Retry
    priority: int
    lease: float | None
    timeout: float | None
    deadline: float | None
    strict: bool

    def policy(self, version: int | None = None) -> KindPolicy:
        """Return the numbers that the kind brings to the database."""
        return KindPolicy(
            self.name,
            self.version if version is None else version,
            self.priority,
            self.retry.max_attempts,
            float(self.retry.initial),
            float(self.retry.factor),
            float(self.retry.max_delay),
            float(self.retry.jitter),
            None if self.deadline is None else float(self.deadline),
        )


def declare(handler: Callable[..., Any], *, name: str | None, **options: Any) -> Kind:
    """Read a handler's signature into a Kind.

    Raises:
        ConfigurationError: it does not take a context (and an input), or a number is out of range.
    """
    title = name or getattr(handler, "__name__", None)
    if not title:
        raise ConfigurationError(f"{handler!r} has no name; give one: @app.task(kind=…)")
    parameters = [
        p
        for p in inspect.signature(handler).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if not 1 <= len(parameters) <= 2:
        raise ConfigurationError(
            f"handler {title} takes {len(parameters)} parameters; "
            "write def handler(ctx) or def handler(ctx, input)"
        )
    for option in ("lease", "timeout", "deadline"):
        if options[option] is not None and not 0 < options[option] <= LONGEST:
            raise ConfigurationError(
                f"{option} of {title} must be more than 0 and at most {LONGEST:.0f} seconds"
            )
    takes_input = len(parameters) == 2
    return Kind(
        name=title,
        handler=handler,
        is_async=inspect.iscoroutinefunction(handler),
        takes_input=takes_input,
        input_type=annotation_of(handler, parameters[1].name) if takes_input else Any,
        result_type=annotation_of(handler),
        **options,
    )


class Registry:
    """The kinds of one App, by name and version."""

    def __init__(self) -> None:
        self._by_pair: dict[tuple[str, int], Kind] = {}
        self._by_handler: dict[Callable[..., Any], Kind] = {}

    def add(self, kind: Kind) -> None:
        """Register a kind for its version and those it accepts.

        Raises:
            ConfigurationError: one of these is taken.
        """
        for version in (kind.version, *kind.accepts):
            taken = self._by_pair.get((kind.name, version))
            if taken is not None:
                raise ConfigurationError(
                    f"kind {kind.name} version {version} is declared twice; "
                    "give the newer function a higher version="
                )
        for version in (kind.version, *kind.accepts):
            self._by_pair[kind.name, version] = kind
        self._by_handler[kind.handler] = kind

    def resolve(self, target: Callable[..., Any] | str) -> Kind:
        """Return the newest kind for a function or a name.

        Raises:
            UnknownKind: it is not declared; the message lists what is.
        """
        if callable(target):
            kind = self._by_handler.get(target)
            title = getattr(target, "__qualname__", repr(target))
        else:
            versions = [k for (name, _), k in self._by_pair.items() if name == target]
            kind = max(versions, key=lambda k: k.version, default=None)
            title = name_in_a_line(target)
        if kind is None:
            known = ", ".join(sorted({name for name, _ in self._by_pair})) or "none"
            raise UnknownKind(f"{title} is not a task of this App; declared are: {known}")
        return kind

    def find(self, name: str, version: int) -> Kind | None:
        """Return the kind that runs this version."""
        return self._by_pair.get((name, version))

    def pairs(self) -> list[tuple[str, int]]:
        """Return every (kind, version) that can be claimed."""
        return sorted(self._by_pair)

    def kinds(self) -> Iterable[Kind]:
        """Return the declared kinds, each once."""
        return self._by_handler.values()

    def policies(self) -> Iterable[KindPolicy]:
        """Return the policy of each pair."""
        return [self._by_pair[pair].policy(pair[1]) for pair in self.pairs()]
