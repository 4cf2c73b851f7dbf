# SPDX-License-Identifier: Apache-2.0
"""Requests to Fabric Manager, each in a process of its own that is killed at the timeout.

There are two ways: the SDK (``library``), and the program ``fmpm`` of NVIDIA's
Fabric-Manager-Client, which does the same without the library on the host of the agent. ``fmpm``
1.0.1 cannot name virtual functions, and its option ``--set-activated-list`` sends an empty list
whatever its argument is: ``parsePartitionIdlistString`` of ``fmpm.cpp`` advances the pointer to the
number of ids instead of the number. An empty list would cut the links of each running server, so
that option is used only where the list is empty.

Neither way needs a privilege for a TCP address. The owner of a unix socket decides who may connect.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyborg.core.errors import DriverFailed
from cyborg.core.text import sanitize
from cyborg.drivers.base import InvalidOption
from cyborg.drivers.gpu.fabric.codes import Code, explain
from cyborg.drivers.gpu.fabric.partitions import Partition, parse_partitions

LIBRARY = "libnvfm.so.1"
COMMAND = "fmpm"
ADDRESS = "127.0.0.1:6666"
TIMEOUT = 10.0  # seconds

MAX_ADDRESS = 255  # bytes: FM_MAX_STR_LENGTH of ``nv_fm_types.h``, less the end of the text
_MAX_OUTPUT = 500
_KILL_TIMEOUT = 5.0  # seconds
# Part of the timeout in which the library must connect: the rest is for the start of its process
# and for the request, so that the library tells why it cannot connect before it is killed.
_CONNECT_PART = 0.5
_MAX_STATUS = 127  # of an exit with an error of the program, not of Fabric Manager
_PROGRAM = Path(__file__).with_name("library.py")


class LibraryMissing(DriverFailed):
    """The library cannot be loaded."""


class RequestFailed(DriverFailed):
    """Fabric Manager refused a request; ``code`` is the returned value."""

    def __init__(self, code: int, call: str, address: str) -> None:
        super().__init__(explain(code, call, address))
        self.returned = code


class RequestTimedOut(DriverFailed):
    """A request was not answered in time: its effect is unknown."""


@dataclass(frozen=True, slots=True)
class FabricRequests:
    """Requests to the Fabric Manager at one address.

    ``address`` is ``host:port`` or the absolute path of a unix socket, ``timeout`` in seconds for
    each request. ``library`` is the name or path of the SDK, ``command`` the program that is used
    instead if the library cannot be loaded. Each method raises RequestFailed, RequestTimedOut, or
    another DriverFailed if the request could not be made.
    """

    address: str = ADDRESS
    timeout: float = TIMEOUT
    library: str = LIBRARY
    command: str = COMMAND

    def list_partitions(self) -> tuple[Partition, ...]:
        """Return the partitions, ordered by id."""
        body = self._request("list", ["-l"])
        try:
            return parse_partitions(body)
        except (KeyError, TypeError, ValueError) as exc:
            raise DriverFailed(
                f"Fabric Manager at {self.address} returned a malformed list of partitions "
                f"({type(exc).__name__}: {exc}): compare its version with that of the library"
            ) from exc

    def activate(self, partition: int, functions: Sequence[str] = ()) -> None:
        """Activate a partition, with virtual functions in the order of its GPUs, if any."""
        refusal = "name virtual functions" if functions else None
        self._request("activate", ["-a", str(partition)], [str(partition), *functions], refusal)

    def deactivate(self, partition: int) -> None:
        """Deactivate a partition."""
        self._request("deactivate", ["-d", str(partition)], [str(partition)])

    def set_activated(self, ids: Sequence[int]) -> None:
        """Send the list of the active partitions, after a start with ``--restart``."""
        refusal = "send the list of active partitions" if ids else None
        self._request("set", ["--set-activated-list", ""], [str(number) for number in ids], refusal)

    def _request(
        self,
        operation: str,
        options: Sequence[str],
        arguments: Sequence[str] = (),
        refusal: str | None = None,
    ) -> Any:
        """Return the answer to a request by the library, or by the program fmpm without it.

        ``arguments`` are those of the function of the library, ``options`` those of fmpm;
        ``refusal`` is what fmpm cannot do.
        """
        try:
            return self._call_library(operation, arguments)
        except LibraryMissing as exc:
            command = shutil.which(self.command)
            if command is None:
                raise
            if refusal is not None:
                raise DriverFailed(f"{self.command} cannot {refusal}, and {exc.message}") from exc
        return self._call_command(command, operation, options)

    def _call_library(self, operation: str, arguments: Sequence[str]) -> Any:
        """Return the answer of the library, which a process of its own loads.

        Raise LibraryMissing, and RequestFailed if Fabric Manager refuses.
        """
        # The program needs no package of this environment: without them it starts in 30 ms.
        program = [sys.executable, "-I", "-S", str(_PROGRAM)]
        milliseconds = max(1, int(self.timeout * _CONNECT_PART * 1000))
        connection = [self.library, self.address, str(milliseconds)]
        answer = self._run(self.library, [*program, *connection, operation, *arguments], operation)
        if "missing" in answer:
            raise LibraryMissing(
                f"{self.library} cannot be loaded ({answer['missing']}): install "
                "nvidia-fabricmanager-dev, or the program fmpm"
            )
        if answer["code"] != Code.SUCCESS:
            raise RequestFailed(answer["code"], answer["call"], self.address)
        return answer

    def _call_command(self, command: str, operation: str, options: Sequence[str]) -> Any:
        where = "--unix-domain-socket" if self.address.startswith("/") else "--hostname"
        return self._run(self.command, [command, where, self.address, *options], operation)

    def _run(self, name: str, command: Sequence[str], operation: str) -> Any:
        """Return the JSON document that a program prints; None if it prints nothing.

        ``name`` is that of the library or program, for errors.
        """
        try:
            result = _run_program(command, self.timeout)
        except subprocess.TimeoutExpired as exc:
            raise RequestTimedOut(
                f"Fabric Manager at {self.address} did not complete {operation} within "
                f"{self.timeout:g} s: read /var/log/fabricmanager.log, and restart "
                "nvidia-fabricmanager if it hangs"
            ) from exc
        code = result.returncode
        if code > _MAX_STATUS:
            # fmpm exits with the returned value, of which the system keeps eight bits.
            raise RequestFailed(code - 256, f"{name} {operation}", self.address)
        with contextlib.suppress(RecursionError, ValueError):  # no JSON: the error below
            if code == 0:
                return json.loads(result.stdout) if result.stdout.strip() else None
        raise DriverFailed(
            f"{name} ended with {code} in {operation} of Fabric Manager at {self.address}: "
            f"{sanitize(result.stdout + result.stderr, _MAX_OUTPUT)}"
        )


def check_address(address: str) -> str:
    """Return an address. Raise InvalidOption if it is not usable."""
    host, _, port = address.rpartition(":")
    is_tcp = bool(host) and port.isdecimal() and 0 < int(port) < 65536
    if not (address.startswith("/") or is_tcp) or len(os.fsencode(address)) > MAX_ADDRESS:
        raise InvalidOption(
            address, f"host:port or the path of a unix socket, at most {MAX_ADDRESS} characters"
        )
    return address


# Not subprocess.run: at a timeout it waits without an end for a process that cannot be killed.
def _run_program(command: Sequence[str], timeout: float) -> "subprocess.CompletedProcess[str]":
    """Run a program, and return its result.

    Raise TimeoutExpired after the timeout, with the process killed, and DriverFailed if the program
    cannot be started.
    """
    try:
        process = subprocess.Popen(  # noqa: S603  (a configured program, no shell)
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            start_new_session=True,
        )
    except OSError as exc:
        raise DriverFailed(f"{command[0]} cannot be started: {exc.strerror}") from exc
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        # A process that hangs in the kernel does not end: its thread must not hang too.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_KILL_TIMEOUT)
        raise
    texts = [data.decode(errors="replace") for data in (output, errors)]
    return subprocess.CompletedProcess(command, process.returncode, *texts)
