# SPDX-License-Identifier: Apache-2.0
"""Table cells for the hosts, options and settings of drivers."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from cliff import columns

from cyborg.cli import services
from cyborg.cli.common import formatting


class Hosts(columns.FormattableColumn[Any]):
    """Hosts of a driver: one line for each backend with its error."""

    def human_readable(self) -> str:
        """Return the value as lines of text."""
        return "\n".join(_format_host(host) for host in self._value or ())


class HostsWithRemarks(Hosts):
    """Hosts of a driver with the remarks of each backend about its configuration."""

    def human_readable(self) -> str:
        """Return the value as lines of text."""
        lines = []
        for host in self._value or ():
            lines.append(_format_host(host))
            lines += [f"  remark: {remark}" for remark in host.get("remarks") or ()]
        return "\n".join(lines)


class Statuses(columns.FormattableColumn[Any]):
    """Numbers of backends by status, in one line."""

    def human_readable(self) -> str:
        """Return the value as one line of text, with the largest number first.

        >>> Statuses({"FAILED": 2, "READY": 9998}).human_readable()
        '9998 READY, 2 FAILED'
        """
        counts = sorted((self._value or {}).items(), key=lambda item: (-item[1], item[0]))
        return ", ".join(f"{count} {status}" for status, count in counts)


class HostsSummary(Hosts):
    """Backends of a driver in one line: the name of one backend, or numbers by status."""

    def human_readable(self) -> str:
        """Return the value as one line of text."""
        hosts = self._value or []
        if len(hosts) == 1:
            return _format_host({**hosts[0], "error": None})
        return Statuses(Counter(host["status"] for host in hosts)).human_readable()


class Options(columns.FormattableColumn[Any]):
    """Options of a driver: one line for each option."""

    def human_readable(self) -> str:
        """Return the value as lines of text."""
        return "\n".join(
            f"{o['name']} ({o['kind']}, {formatting.to_text(o['default']) or 'unset'}"
            f"{', host file only' if o.get('host_only') else ''}): {o['help']}"
            for o in self._value or ()
        )


class Settings(columns.FormattableColumn[Any]):
    """Effective options of the backends of one host: one line for each option and its source."""

    def human_readable(self) -> str:
        """Return the value as lines of text."""
        return "\n".join(
            f"{backend['backend']}: {option['name']} = "
            f"{formatting.to_text(option['value']) or 'unset'} ({option['source']})"
            for backend in self._value or ()
            for option in backend["options"]
        )


def hosts_with_status(driver: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the hosts of a driver, with the status UNKNOWN if the agent is down."""
    return [
        {**host, "status": services.effective_status(host["status"], host["state"])}
        for host in driver["hosts"]
    ]


def _format_host(host: Mapping[str, Any]) -> str:
    backend = f" ({host['backend']})" if host["backend"] else ""
    text = f"{host['host']}{backend} {host['status']}"
    if host["desired_status"] in ("disabled", "absent"):
        text += f", desired {host['desired_status']}"
    if host["applied"] is False:
        text += ", not applied yet"
    if host["state"] != "up":
        text += f", agent {host['state']}"
    return text + (f": {host['error']}" if host["error"] else "")
