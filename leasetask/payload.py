"""JSON in and out: exact, or refused with the path of what does not fit.

msgspec does the encoding and the conversion to annotated types. Around it stand the checks that it
and jsonb lack: NaN and the infinities (msgspec writes null), NUL characters and lone surrogates
(jsonb refuses them, in the middle of somebody's batch), and types that JSON would change silently.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, get_type_hints
from weakref import WeakKeyDictionary

import msgspec

from leasetask.errors import ConfigurationError, PayloadError

DEFAULT_LIMIT = 1024 * 1024
"""Largest encoded payload, in bytes."""

ERROR_TEXT_LIMIT = 8_000
"""What is kept of an error's message or traceback, in characters."""


def encode(value: object, type_: Any = Any, *, what: str, limit: int = DEFAULT_LIMIT) -> str:
    """Encode a value as JSON text that jsonb keeps exactly.

    Args:
        value: a plain JSON value, or anything that fits `type_`.
        type_: the annotation that the value will be decoded with.
        what: what the value is, for the error's text (`input of publish`).
        limit: the largest encoding allowed, in bytes.

    Raises:
        PayloadError: the value is not JSON, does not fit `type_`, or is too large.
    """
    plain = value
    if type_ is not Any:
        try:
            plain = msgspec.to_builtins(value, str_keys=True, enc_hook=_to_plain)
            _convert(plain, type_)
        except Exception as error:  # also whatever a type's own constructor raises
            raise PayloadError(f"{what} does not fit {_name(type_)}: {error}") from error
    try:
        encoded = msgspec.json.encode(_exact(plain, type_ is not Any))
    except _Inexact as error:
        raise PayloadError(f"{what}: {error}") from error
    except RecursionError as error:
        raise PayloadError(f"{what} is nested too deeply") from error
    if len(encoded) > limit:
        raise PayloadError(
            f"{what} is {len(encoded)} bytes of JSON; the limit is {limit} "
            "(store large data elsewhere and pass its place, or raise App(payload_limit=…))"
        )
    return encoded.decode()


def decode(text: str | bytes, type_: Any = Any, *, what: str) -> Any:
    """Decode JSON text, through an annotation.

    Raises:
        PayloadError: the text is not what `type_` says; the message names the path.
    """
    return convert(msgspec.json.decode(text), type_, what=what)


def convert(plain: object, type_: Any, *, what: str) -> Any:
    """Convert decoded JSON to an annotated type.

    Raises:
        PayloadError: it does not fit; the message names the path.
    """
    readable(plain)
    if type_ is Any:
        return plain
    try:
        return _convert(plain, type_)
    except Exception as error:  # also whatever a type's own constructor raises
        raise PayloadError(f"{what} does not fit {_name(type_)}: {error}") from error


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stored JSON that PostgreSQL takes and Python does not: too deep, or a number out of range."""

    text: str
    reason: str

    def __str__(self) -> str:
        return self.text


_decode = msgspec.json.Decoder().decode


def decode_stored(data: bytes | str) -> Any:
    """Decode JSON from the database; what cannot be is kept aside, for it must harm nobody else."""
    try:
        return _decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        text = data if isinstance(data, str) else bytes(data).decode("utf-8", "replace")
        return Unreadable(text, f"{type(error).__name__}: {error}")


def readable(plain: Any) -> Any:
    """Return decoded JSON, or refuse what could not be decoded; raises PayloadError."""
    if isinstance(plain, Unreadable):
        raise PayloadError(f"stored JSON cannot be read: {plain.reason}")
    return plain


def fingerprint(args: tuple[object, ...], kwargs: dict[str, object]) -> str | None:
    """Return a short hash of a step's arguments, or None if there are none or they are not JSON."""
    if not args and not kwargs:
        return None
    try:
        plain = _exact([list(args), kwargs], True)
    except (_Inexact, RecursionError):
        return None
    encoded = msgspec.json.encode(plain, order="deterministic")
    return hashlib.blake2b(encoded, digest_size=6).hexdigest()


def printable(text: str, limit: int = ERROR_TEXT_LIMIT) -> str:
    """Return text that jsonb takes: cut to `limit` characters, NULs and lone surrogates escaped."""
    if len(text) > limit:
        text = (
            f"{text[: limit // 2]}\n… {len(text) - limit} characters cut …\n{text[-limit // 2 :]}"
        )
    return text.encode("utf-8", "backslashreplace").decode().replace("\x00", "\\u0000")


def name_in_a_line(name: object, limit: int = 100) -> str:
    """Return a name as a message shows it: as it is if that is one short line, else quoted and cut."""
    text = name if isinstance(name, str) and name.isprintable() else repr(name)
    return text if len(text) <= limit else f"{text[:limit]}…"


def annotation_of(function: Callable[..., Any], name: str = "return") -> Any:
    """Return the annotation of a function's parameter or result; `Any` when there is none.

    Raises:
        ConfigurationError: the annotation is text that names nothing that can be found.
    """
    target = function.func if isinstance(function, functools.partial) else function
    if not getattr(target, "__annotations__", None):
        return Any
    try:
        hint = _hints_of(getattr(target, "__func__", target)).get(name, Any)
    except NameError as error:
        raise ConfigurationError(
            f"the annotations of {getattr(target, '__qualname__', target)} cannot be read: {error}; "
            "define the type at the top of its module"
        ) from error
    return type(None) if hint is None else hint


_known_hints: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def _hints_of(target: Any) -> dict[str, Any]:
    """Evaluate a function's annotations, which takes as long as the rest of a step, once."""
    hints = _known_hints.get(target)
    if hints is None:
        hints = _known_hints[target] = get_type_hints(target, include_extras=True)
    return hints


class _Inexact(Exception):
    """A part of a value that JSON or jsonb would change; gathers its path on the way out."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path: list[object] = []

    def __str__(self) -> str:
        return f"${''.join(_below(part) for part in reversed(self.path))} {self.reason}"


def _exact(value: object, typed: bool) -> object:
    """Return `value` as jsonb will give it back; refuse what jsonb or JSON would change.

    `typed`: an annotation makes tuples of lists again.
    """
    kind = type(value)
    if kind is str:
        return _exact_text(value)  # type: ignore[arg-type]  # narrowed by `kind`
    if value is None or kind is bool or kind is int:
        return value
    if kind is float:
        return _exact_float(value)  # type: ignore[arg-type]  # narrowed by `kind`
    if kind is dict:
        return _exact_parts(value.items(), typed, _exact_key)  # type: ignore[attr-defined]  # narrowed by `kind`
    if kind is list or (kind is tuple and typed):
        return list(_exact_parts(enumerate(value), typed, int).values())  # type: ignore[arg-type]  # narrowed by `kind`
    raise _Inexact(
        f"is a {kind.__name__}, which JSON would change; "
        "annotate the parameter or result with its type, or convert it to plain JSON"
    )


def _exact_parts(
    parts: Iterable[tuple[Any, object]], typed: bool, exact_key: Callable[[Any], Any]
) -> dict[Any, object]:
    made = {}
    for key, item in parts:
        name = exact_key(key)
        try:
            made[name] = _exact(item, typed)
        except _Inexact as error:
            error.path.append(key)
            raise
    return made


def _below(part: object) -> str:
    """Return a part of a path, on one line however odd a key is."""
    if isinstance(part, int):
        return f"[{part}]"
    return f".{part}" if isinstance(part, str) and part.isidentifier() else f"[{part!r:.60}]"


def _exact_text(value: str) -> str:
    if "\x00" in value:
        raise _Inexact("holds a NUL character, which PostgreSQL cannot store")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise _Inexact("holds a lone surrogate, which is not text") from error
    return value


def _exact_key(key: object) -> str:
    if type(key) is not str:
        raise _Inexact(f"has the key {key!r}; JSON's keys are text")
    return _exact_text(key)


def _exact_float(value: float) -> float | int:
    if not math.isfinite(value):
        raise _Inexact(f"is {value}, which JSON cannot hold")
    # jsonb gives 1e16 back as an integer and -0.0 as 0.0: so does the first run.
    if value == 0:
        return 0.0
    return int(value) if abs(value) >= 1e16 else value


def _convert(plain: object, type_: Any) -> Any:
    return msgspec.convert(plain, type_, str_keys=True, dec_hook=_from_plain)


def _to_plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    raise TypeError(f"a {type(value).__name__} is not JSON")


def _from_plain(type_: Any, plain: Any) -> Any:
    if isinstance(plain, type_):
        return plain
    if hasattr(type_, "model_validate"):
        return type_.model_validate(plain)
    raise TypeError(f"{_name(type_)} cannot be read from JSON")


def _name(type_: Any) -> str:
    return getattr(type_, "__qualname__", None) or str(type_)
