# SPDX-License-Identifier: Apache-2.0
"""What the tables can hold of what agents tell: checked before anything is written."""

from collections.abc import Sequence
from typing import Any

from cyborg.core import names
from cyborg.core.errors import Invalid
from cyborg.core.report import BackendState, Report

MAX_NAME = 200  # characters of a provider's name, as Placement has it
MAX_GENERATION = 2**53  # what JSON carries exactly everywhere


def text(field: str, value: Any, longest: int = 255) -> str:
    """Return an argument that must be a short text. Raises Invalid, naming it."""
    if not isinstance(value, str) or not 1 <= len(value) <= longest or not value.isprintable():
        raise Invalid(
            f"{field} must be a string of 1 to {longest} printable characters", field=field
        )
    return value


def optional(field: str, value: Any) -> str | None:
    """Return the same of an argument that may be None."""
    return None if value is None else text(field, value)


def revision(field: str, value: Any) -> int | None:
    """Return an argument that must be a number that only rises, or None. Raises Invalid."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_GENERATION:
        raise Invalid(f"{field} must be a whole number from 0", field=field)
    return value


def check_report(report: Report) -> None:
    """Refuse what the tables cannot hold. Raises Invalid, naming the part."""
    check_backends(report.backends)
    _fits("host", report.host, "")
    _fits("digest", report.digest, "", 64)
    if not 0 <= report.generation <= MAX_GENERATION:
        raise Invalid(f"generation {report.generation} is out of range", field="generation")
    for device in report.devices:
        for part in device.deployables:
            _fits("provider name", names.provider_name(report.host, part.address), "", MAX_NAME)


def check_backends(states: Sequence[BackendState]) -> None:
    """Refuse backends that the table cannot hold. Raises Invalid."""
    for state in states:
        _fits("backend name", state.name, "")
        _fits("driver name", state.driver, "")
        _fits("error", state.error, state.name, 65535)
    if len({state.name for state in states}) != len(states):
        raise Invalid("a backend stands twice in the list", field="drivers")


def _fits(what: str, value: str | None, where: str, longest: int = 255) -> None:
    """Refuse text that is too long, or that a database or a log could not show."""
    if value is None or (len(value) <= longest and value.replace("\n", "").isprintable()):
        return
    at = f" of {where}" if where else ""
    raise Invalid(f"{what}{at} is more than {longest} characters or not printable", field=what)
