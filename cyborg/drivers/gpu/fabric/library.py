# SPDX-License-Identifier: Apache-2.0
"""One request to Fabric Manager by its SDK, the library ``libnvfm.so.1``; a program.

::

    library.py LIBRARY ADDRESS TIMEOUT OPERATION [ARGUMENT...]

ADDRESS is ``host:port`` or the path of a unix socket, TIMEOUT that of the connection in
milliseconds. OPERATION is ``list``, ``activate ID [FUNCTION...]`` with the PCI addresses of virtual
functions, ``deactivate ID``, or ``set [ID...]`` for the list of the active partitions.

The program prints a JSON object: ``code``, the last returned value; ``call``, the function that
returned it; for ``list`` also the partitions in the form of ``fmpm -l``. If the library cannot be
loaded, it prints the reason as ``missing``.

It is a program, and imports the standard library only, because a call of a C library cannot be
interrupted: a process can be killed, and a fault of the library ends the process and not the agent.

``nv_fm_agent.h`` and ``nv_fm_types.h`` of the package nvidia-fabricmanager-dev declare functions
and structures; NVIDIA's Fabric Manager User Guide, "Fabric Manager SDK", explains them. A structure
begins with its version: its size, and the number of its layout in the highest byte. Older libraries
know only the first layout of the connection, the one of the guide.
"""

import ctypes
import json
import re
import sys
from typing import Any

SUCCESS, VERSION_MISMATCH = 0, -6
MAX_PARTITIONS, MAX_GPUS = 64, 16
_INET, _UNIX = 1, 2  # of nvFmApiAddrTypes
_FUNCTION = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")
_Id = ctypes.c_uint


class ConnectParamsV1(ctypes.Structure):
    """Parameters of a connection; ``timeoutMs`` is in milliseconds."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("addressInfo", ctypes.c_char * 256),
        ("timeoutMs", ctypes.c_uint),
        ("addressIsUnixSocket", ctypes.c_uint),
    )


class ConnectParamsV2(ctypes.Structure):
    """Parameters of a connection, with the type of the address."""

    _fields_ = (*ConnectParamsV1._fields_, ("addressType", ctypes.c_uint))


class PciDevice(ctypes.Structure):
    """Address of a virtual function."""

    _fields_ = tuple((name, ctypes.c_uint) for name in ("domain", "bus", "device", "function"))


class GpuInfo(ctypes.Structure):
    """A GPU of a partition; ``physicalId`` is its module id."""

    _fields_ = (
        ("physicalId", ctypes.c_uint),
        ("uuid", ctypes.c_char * 80),
        ("pciBusId", ctypes.c_char * 32),
        ("numNvLinksAvailable", ctypes.c_uint),
        ("maxNumNvLinks", ctypes.c_uint),
        ("nvlinkLineRateMBps", ctypes.c_uint),
    )


class PartitionInfo(ctypes.Structure):
    """A partition."""

    _fields_ = (
        ("partitionId", _Id),
        ("isActive", ctypes.c_uint),
        ("numGpus", ctypes.c_uint),
        ("gpuInfo", GpuInfo * MAX_GPUS),
    )


class PartitionList(ctypes.Structure):
    """The partitions of the host."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("numPartitions", ctypes.c_uint),
        ("maxNumPartitions", ctypes.c_uint),
        ("partitionInfo", PartitionInfo * MAX_PARTITIONS),
    )


class ActivatedList(ctypes.Structure):
    """The ids of the active partitions."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("numPartitions", ctypes.c_uint),
        ("partitionIds", _Id * MAX_PARTITIONS),
    )


class _Failed(Exception):
    """A function did not return SUCCESS."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(call, code)
        self.answer = {"call": call, "code": code}


class _Library:
    """The loaded library."""

    def __init__(self, name: str) -> None:
        self._functions = ctypes.CDLL(name)
        self._handle = ctypes.c_void_p()

    def call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._functions, name)
        except AttributeError:
            raise SystemExit(f"no function {name}: install a later release") from None
        code = int(function(*arguments))
        if code != SUCCESS:
            raise _Failed(name, code)

    def request(self, name: str, *arguments: Any) -> None:
        self.call(name, self._handle, *arguments)

    def connect(self, address: str, timeout: int) -> None:
        """Connect to Fabric Manager; an earlier library has only the first layout of parameters."""
        is_unix = address.startswith("/")
        for kind, layout in ((ConnectParamsV2, 2), (ConnectParamsV1, 1)):
            params = _versioned(kind, layout)
            params.addressInfo = address.encode()
            params.timeoutMs = timeout
            params.addressIsUnixSocket = is_unix
            if layout > 1:
                params.addressType = _UNIX if is_unix else _INET
            try:
                self.call("fmConnect", ctypes.byref(params), ctypes.byref(self._handle))
            except _Failed as exc:
                if layout > 1 and exc.answer["code"] == VERSION_MISMATCH:
                    continue
                raise
            return

    def list_partitions(self) -> dict[str, Any]:
        partitions = _versioned(PartitionList, 1)
        self.request("fmGetSupportedFabricPartitions", ctypes.byref(partitions))
        count = min(partitions.numPartitions, MAX_PARTITIONS)
        return {"partitionInfo": [_dump(p) for p in partitions.partitionInfo[:count]]}

    def activate(self, partition: int, functions: list[str]) -> None:
        if not functions:
            self.request("fmActivateFabricPartition", _Id(partition))
            return
        devices = (PciDevice * len(functions))(*map(_parse, functions))
        self.request("fmActivateFabricPartitionWithVFs", _Id(partition), devices, _Id(len(devices)))

    def set_activated(self, ids: list[int]) -> None:
        active = _versioned(ActivatedList, 1)
        active.numPartitions = len(ids)
        active.partitionIds[: len(ids)] = ids
        self.request("fmSetActivatedFabricPartitions", ctypes.byref(active))


def _versioned(kind: type[Any], layout: int) -> Any:
    return kind(version=ctypes.sizeof(kind) | layout << 24)


def _parse(function: str) -> PciDevice:
    """Return the address of a function, with the numbers that Linux gives it.

    ``fmPciDevice_t`` allows numbers above 7 for functions with alternative routing ids (ARI); Linux
    counts those as devices, and NVIDIA's plug-in for KubeVirt passes them in this form too.
    """
    found = _FUNCTION.fullmatch(function)
    if found is None:
        raise SystemExit(f"{function!r} is not a PCI address")
    return PciDevice(*(int(number, 16) for number in found.groups()))


def _dump(partition: Any) -> dict[str, int | list[dict[str, int]]]:
    names = [name for name, kind, *_ in GpuInfo._fields_ if kind is ctypes.c_uint]
    return {
        **{name: getattr(partition, name) for name in ("partitionId", "isActive", "numGpus")},
        "gpuInfo": [
            {name: getattr(gpu, name) for name in names}
            for gpu in partition.gpuInfo[: min(partition.numGpus, MAX_GPUS)]
        ],
    }


def main(name: str, address: str, timeout: str, operation: str, *arguments: str) -> dict[str, Any]:
    """Return the answer to one request."""
    try:
        library = _Library(name)
    except OSError as exc:
        return {"missing": str(exc)}
    body: dict[str, Any] = {}
    try:
        library.call("fmLibInit")
        library.connect(address, int(timeout))
        if operation == "list":
            body = library.list_partitions()
        elif operation == "activate":
            library.activate(int(arguments[0]), list(arguments[1:]))
        elif operation == "deactivate":
            library.request("fmDeactivateFabricPartition", _Id(int(arguments[0])))
        elif operation == "set":
            library.set_activated([int(number) for number in arguments])
        else:
            raise SystemExit(f"{operation!r} is not an operation")
        # No fmDisconnect: the connection ends with the process, also where it would hang.
    except _Failed as exc:
        return exc.answer
    return {"code": SUCCESS, "call": operation, **body}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])))
