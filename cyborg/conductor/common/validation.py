# SPDX-License-Identifier: Apache-2.0
"""Validate arguments and reports against the limits of the tables before anything is written."""

from collections.abc import Sequence
from typing import Any

from cyborg.core import naming
from cyborg.core.drivers.registry import MAX_OPTIONS
from cyborg.core.errors import Invalid
from cyborg.core.inventory.report import MAX_REMARKS, BackendState, Report

MAX_NAME = 200  # characters of a provider name, as in Placement
MAX_GENERATION = 2**53  # the largest integer that every JSON parser reads exactly


def check_text(field: str, value: Any, max_length: int = 255) -> str:
    """Return ``value``, or raise Invalid unless it is a short printable string."""
    if not isinstance(value, str) or not 1 <= len(value) <= max_length or not value.isprintable():
        raise Invalid(
            f"{field} must be a string of 1 to {max_length} printable characters", field=field
        )
    return value


def check_optional_text(field: str, value: Any) -> str | None:
    """Return ``value``, or raise Invalid unless it is None or a short printable string."""
    return None if value is None else check_text(field, value)


def check_generation(field: str, value: Any) -> int | None:
    """Return ``value``, or raise Invalid unless it is None or a generation number."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_GENERATION:
        raise Invalid(f"{field} must be an integer from 0 to 2**53", field=field)
    return value


def check_report(report: Report) -> None:
    """Raise Invalid, with the field, for a report that the tables cannot store."""
    check_backends(report.backends)
    _check_length("host", report.host, "")
    _check_length("digest", report.digest, "", 64)
    if not 0 <= report.generation <= MAX_GENERATION:
        raise Invalid(
            f"generation {report.generation} is out of range 0..2**53", field="generation"
        )
    for device in report.devices:
        for deployable in device.deployables:
            name = naming.provider_name(report.host, deployable.address)
            _check_length("provider name", name, "", MAX_NAME)


def check_backends(states: Sequence[BackendState]) -> None:
    """Raise Invalid for backends that the table cannot store."""
    for state in states:
        _check_length("backend name", state.name, "")
        _check_length("driver name", state.driver, "")
        _check_length("error", state.error, state.name, 65535)
        remarks, settings = state.remarks or (), state.settings or ()
        for remark in remarks:
            _check_length("remark", remark, state.name, 4096)
        for setting in settings:
            _check_length("option name", setting.name, state.name)
        if len(remarks) > MAX_REMARKS or len(settings) > MAX_OPTIONS:
            raise Invalid(
                f"backend {state.name} has {len(remarks)} remarks and {len(settings)} options; at "
                f"most {MAX_REMARKS} and {MAX_OPTIONS} are allowed",
                field="backends",
            )
    if len({state.name for state in states}) != len(states):
        raise Invalid("duplicate backend name in the list", field="drivers")


def _check_length(kind: str, value: str | None, backend: str, max_length: int = 255) -> None:
    """Raise Invalid for text that is too long, or not printable apart from line ends."""
    if value is None or (len(value) <= max_length and value.replace("\n", "").isprintable()):
        return
    owner = f" of {backend}" if backend else ""
    raise Invalid(
        f"{kind}{owner} has more than {max_length} characters or is not printable", field=kind
    )
