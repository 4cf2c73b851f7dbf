# SPDX-License-Identifier: Apache-2.0
"""Loggers whose lines carry fields: ``LOG.info("Bound %d ARQs", count, instance=uuid)``.

::

    text   INFO cyborg.conductor... [None req-... ] [instance=02c9...] Bound 2 ARQs
    JSON   {"message": "Bound 2 ARQs", ..., "extra": {"instance": "02c9..."}}

The formatters of oslo.log show the fields: they read the attributes of the record that ``process``
sets. This module needs only the standard library, so that drivers can use it.

The context of a trace is text, too: the value of the header ``traceparent``, version 00:
``00-`` trace id, 32 hexadecimal digits; parent span id, 16; flags, 2. See
https://www.w3.org/TR/trace-context/. Clients, peers and stored rows provide it, so it is checked
before each use.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

# Names of fields, in the order of the text.
FIELDS = (
    "job",
    "audit",
    "attachment",
    "discovery",
    "service",
    "message_id",
    "driver",
    "host",
    "backend",
    "device",
    "provider",
    "deployable",
    "accelerator",
    "arq",
    "device_context",
    "instance",
    "image",
    "trace_id",
)

# Number of values of a field with several values that are shown.
MAX_VALUES = 50

# Characters of a value that are shown; a peer may choose the value.
MAX_LENGTH = 255

_STANDARD = ("exc_info", "stack_info", "stacklevel")
_ORDER = {name: position for position, name in enumerate(FIELDS)}
# Not threading.local: a call that is started in another thread gets a copy of the context.
_scope: ContextVar[Mapping[str, Any]] = ContextVar("cyborg_log_fields")
_NO_FIELDS: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Remark:
    """A text to log later, with its fields."""

    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)


class FieldLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose methods take fields as keyword arguments.

    The value of a field is a string, a number, or a collection of them; None omits the field.
    ``extra`` has fields that only JSON shows. ``context`` replaces the oslo context of the thread.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a message; oslo.log never appends the exception that is being handled to it."""
        if not self.isEnabledFor(level):
            return
        msg, options = self.process(msg, kwargs)
        # The frame of this function must not be shown as the origin of the line.
        options["stacklevel"] = options.get("stacklevel", 1) + 1
        if level < logging.WARNING or options.get("exc_info"):
            self.logger.log(level, msg, *args, **options)
            return
        # Our messages quote their cause. In an except block the formatters of oslo.log append it to
        # each warning once more, unless the exception in progress is a built-in one such as
        # ValueError. A formatter of our own was not taken: oslo.log makes those of each handler.
        try:
            raise ValueError
        except ValueError:
            self.logger.log(level, msg, *args, **options)

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Move the fields to the attributes of the record that the formatters of oslo.log read."""
        # What is left after these are the fields: logging itself would refuse unknown arguments.
        result = {name: kwargs.pop(name) for name in _STANDARD if name in kwargs}
        json_fields = kwargs.pop("extra", None) or {}
        context = kwargs.pop("context", None)
        fields = {
            name: _plain(value)
            for name, value in {**_scope.get(_NO_FIELDS), **kwargs}.items()
            if value is not None
        }
        # JSONFormatter shows ``extra``. ContextFormatter shows a string in ``instance`` in front of
        # the message; otherwise each operator's format string would have to name each field.
        extra: dict[str, Any] = {"extra": {**fields, **json_fields}}
        if fields:
            extra["instance"] = f"[{render_fields(fields)}] "
        if context is not None:
            extra["context"] = context
        result["extra"] = extra
        return msg, result


def get_logger(name: str) -> FieldLogger:
    """Return the logger of a module."""
    return FieldLogger(logging.getLogger(name), {})


@contextmanager
def log_fields(**fields: Any) -> Iterator[None]:
    """Add fields to all lines that this thread logs within the block."""
    token = _scope.set({**_scope.get(_NO_FIELDS), **fields})
    try:
        yield
    finally:
        _scope.reset(token)


class OutageFilter(logging.Filter):
    """A logging filter that drops the tracebacks of ``outages``, the given types of exceptions.

    oslo.log still appends the text of the exception.
    """

    def __init__(self, outages: tuple[type[BaseException], ...]) -> None:
        super().__init__()
        self._outages = outages

    def filter(self, record: logging.LogRecord) -> bool:
        """Remove the traceback of an outage; return True, so that every record is logged."""
        if isinstance(record.exc_info, tuple) and isinstance(record.exc_info[1], self._outages):
            record.exc_info = None
        return True


def drop_tracebacks(names: Iterable[str], outages: tuple[type[BaseException], ...]) -> None:
    """Drop the tracebacks of ``outages`` from the lines of these loggers of libraries.

    The formatters of oslo.log still append the text of the exception. A second call has no effect.
    """
    for name in names:
        logger = logging.getLogger(name)
        if not any(isinstance(item, OutageFilter) for item in logger.filters):
            logger.addFilter(OutageFilter(outages))


def render_fields(fields: Mapping[str, Any]) -> str:
    """Return fields as text, such as ``host=compute-1 arq=A arq=B``."""
    names = sorted(fields, key=lambda name: _ORDER.get(name, len(_ORDER)))
    return " ".join(
        f"{name}={_word(value)}"
        for name in names
        for value in (fields[name] if isinstance(fields[name], list) else [fields[name]])
    )


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple | set | frozenset):
        values = sorted(value) if isinstance(value, set | frozenset) else value
        return [_plain(item) for item in values[:MAX_VALUES]]
    return value if isinstance(value, int | float) else str(value)[:MAX_LENGTH]


def _word(value: Any) -> str:
    """Return a value without the characters that separate values or lines."""
    return "".join(c if c.isprintable() and c not in " []" else "?" for c in str(value))


# Characters of a trace context.
LENGTH = 55

# Attempts of a job or a message that its trace shows, so that no trace grows for ever.
MAX_TRACED_ATTEMPTS = 10

_PATTERN = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def parse_trace_context(value: Any) -> str | None:
    """Return a well-formed trace context, None for any other value."""
    is_valid = isinstance(value, str) and _PATTERN.fullmatch(value) is not None
    return value if is_valid else None
