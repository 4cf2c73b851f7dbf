# SPDX-License-Identifier: Apache-2.0
"""Validate arguments and reports against the limits of the tables before anything is written."""

from collections.abc import Sequence
from typing import Any

from cyborg.core import naming
from cyborg.core.drivers.registry import MAX_OPTIONS
from cyborg.core.errors import Invalid
from cyborg.core.inventory.report import MAX_REMARKS, BackendState, Report
from cyborg.core.validation import check_integer

MAX_NAME = 200  # characters of a provider name, as in Placement
MAX_BACKENDS = 256  # of one host


def parse_backends(bodies: Any) -> list[BackendState]:
    """Parse the states of the backends of a host. Raise Invalid."""
    if not isinstance(bodies, Sequence) or len(bodies) > MAX_BACKENDS:
        raise Invalid(f"drivers must be a list of at most {MAX_BACKENDS} objects", field="drivers")
    try:
        states = [BackendState.load_without_details(body) for body in bodies]
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise Invalid(f"malformed drivers: {type(exc).__name__} {exc}", field="drivers") from exc
    check_backends(states)
    return states


def check_report(report: Report) -> None:
    """Raise Invalid, with the field, for a report that the tables cannot store."""
    check_backends(report.backends)
    _check_length("host", report.host, "")
    _check_length("digest", report.digest, "", 64)
    check_integer("generation", report.generation)
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
        raise Invalid("two backends have the same name", field="drivers")


def _check_length(kind: str, value: str | None, backend: str, max_length: int = 255) -> None:
    """Raise Invalid for text that is too long, or not printable apart from line ends."""
    if value is None or (len(value) <= max_length and value.replace("\n", "").isprintable()):
        return
    owner = f" of {backend}" if backend else ""
    raise Invalid(
        f"{kind}{owner} has more than {max_length} characters or is not printable", field=kind
    )
