# SPDX-License-Identifier: Apache-2.0
"""What the tables can hold of what agents tell: checked before anything is written."""

from collections.abc import Sequence

from cyborg.core import names
from cyborg.core.errors import Invalid
from cyborg.core.report import BackendState, Report

MAX_NAME = 200  # characters of a provider's name, as Placement has it
MAX_GENERATION = 2**53  # what JSON carries exactly everywhere
MAX_NODE = 65535


def check_report(report: Report) -> None:
    """Refuse what the tables cannot hold. Raises Invalid, naming the part."""
    check_backends(report.backends)
    _fits("host", report.host, "")
    _fits("digest", report.digest, "", 64)
    if not 0 <= report.generation <= MAX_GENERATION:
        raise Invalid(f"generation {report.generation} is out of range", field="generation")
    for device in report.devices:
        _fits("backend", device.backend, device.address)
        _fits("serial", device.serial, device.address)
        if not -1 <= (device.numa_node or 0) <= MAX_NODE:
            raise Invalid(
                f"numa_node {device.numa_node} of {device.address} is out of range",
                field="numa_node",
            )
        for part in device.deployables:
            _fits("bitstream_id", part.bitstream_id, part.address)
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
