# SPDX-License-Identifier: Apache-2.0
"""Admin commands of NVMe controllers, and the choice of the command that erases.

``permitted_methods`` translates the policy of an operator, the key ``erase`` of a rule. NIST SP
800-88 Rev. 1 (2014), table A-8, lists both secure erase settings of Format NVM as Purge; Sanitize
did not exist then. Rev. 2 (2025) has no commands: it refers to IEEE 2883. The NVM Express Base
Specification, revision 2.3, 8.1.26, says that a sanitize operation purges as IEEE Std 2883 defines
it. The policies are stricter than Rev. 1: a user data erase, whose means the controller
chooses, counts as Clear only. ``sanitize`` permits only what purges in the sense of IEEE 2883.

Commands and data structures are those of the NVM Express Base Specification, revision 2.3: Format
NVM (5.2.10), Get Log Page (5.2.12), Sanitize Status (5.2.12.1.36), Identify (5.2.13), Sanitize
(5.2.22), Controller List (4.6.1) and Secondary Controller List (5.2.13.3.2). ``src/nvme/types.h``
of libnvme has the structures with the offsets that are read here, ``include/linux/nvme.h`` of Linux
the opcodes and the values of CNS. ``<linux/nvme_ioctl.h>`` of the kernel defines ``struct
nvme_passthru_cmd`` and the ioctl.
"""

import ctypes
import fcntl
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from cyborg.core.errors import DriverFailed
from cyborg.core.log import get_logger
from cyborg.drivers.sysfs import open_node

LOG = get_logger(__name__)

# Seconds for a command that does not erase.
COMMAND_TIMEOUT = 30.0

# Opcode, flags, reserved, namespace, dwords 2 and 3, address of metadata, address of data, sizes of
# metadata and data, dwords 10 to 15, timeout in milliseconds, result.
_COMMAND = struct.Struct("<BBHIIIQQII6III")
_ADMIN_IOCTL = 0xC0484E41  # _IOWR('N', 0x41, struct nvme_passthru_cmd)
_IDENTIFY, _GET_LOG_PAGE, _FORMAT, _SANITIZE = 0x06, 0x02, 0x80, 0x84
_CNS_NAMESPACE, _CNS_CONTROLLER, _CNS_ACTIVE_NAMESPACES = 0x00, 0x01, 0x02
_CNS_ALLOCATED_NAMESPACES, _CNS_NAMESPACE_CONTROLLERS = 0x10, 0x12
_CNS_CONTROLLERS, _CNS_SECONDARY_CONTROLLERS = 0x13, 0x15
_SANITIZE_STATUS_LOG = 0x81
_WHOLE_CONTROLLER = 0xFFFFFFFF
_IDENTIFY_BYTES = 4096
# Offsets of the fields of Identify Controller.
_CMIC, _CNTLID, _OACS, _SANICAP, _FNA = 76, 78, 256, 328, 524
# Offsets of the fields of Identify Namespace.
_NLBAF, _FLBAS, _DPS, _NMIC = 25, 26, 29, 30
_LOG_BYTES = 512
_PROGRESS_UNITS = 65536
_OVERWRITE_ONCE = 1 << 4


class Method(StrEnum):
    """Methods to erase a controller or its namespaces, the strongest first.

    The order is the preference wherever methods are listed: ``tuple(Method)`` and ``for method in
    Method`` rely on it.
    """

    SANITIZE_CRYPTO = "sanitize, crypto erase"
    SANITIZE_BLOCK = "sanitize, block erase"
    SANITIZE_OVERWRITE = "sanitize, overwrite"
    FORMAT_CRYPTO = "format, crypto erase"
    FORMAT_ERASE = "format, user data erase"


_SANITIZE_ACTIONS = {
    Method.SANITIZE_CRYPTO: 4,
    Method.SANITIZE_BLOCK: 2,
    Method.SANITIZE_OVERWRITE: 3 | _OVERWRITE_ONCE,
}
# Methods that erase the whole NVM subsystem.
SANITIZE_METHODS = frozenset(_SANITIZE_ACTIONS)

# Key that only the driver nvme has.
ERASE = "erase"


class ErasePolicy(StrEnum):
    """Values of the key ``erase``; ``kernel.nvme.permitted_methods`` returns their methods."""

    PURGE = "purge"
    CLEAR = "clear"
    SANITIZE = "sanitize"
    CRYPTO = "crypto"
    BLOCK = "block"
    OVERWRITE = "overwrite"


_PERMITTED = {
    ErasePolicy.CLEAR: tuple(Method),
    ErasePolicy.PURGE: tuple(method for method in Method if method is not Method.FORMAT_ERASE),
    ErasePolicy.SANITIZE: tuple(_SANITIZE_ACTIONS),
    ErasePolicy.CRYPTO: (Method.SANITIZE_CRYPTO, Method.FORMAT_CRYPTO),
    ErasePolicy.BLOCK: (Method.SANITIZE_BLOCK,),
    ErasePolicy.OVERWRITE: (Method.SANITIZE_OVERWRITE,),
}

_SECURE_ERASE = {Method.FORMAT_ERASE: 1, Method.FORMAT_CRYPTO: 2}


class SanitizeState(StrEnum):
    """Status of the most recent sanitize operation of an NVM subsystem."""

    NEVER = "never sanitized"
    DONE = "completed"
    RUNNING = "in progress"
    FAILED = "failed"
    VERIFYING = "in media verification"


# States by Sanitize Operation Status; 5 to 7 are reserved.
_SANITIZE_STATES = {
    0: SanitizeState.NEVER,
    1: SanitizeState.DONE,
    2: SanitizeState.RUNNING,
    3: SanitizeState.FAILED,
    4: SanitizeState.DONE,  # and all blocks are deallocated
}
# Sanitize State in bits 3:0 of byte 36 (since revision 2.1); the status is then "in progress".
_MEDIA_VERIFICATION = 5
_END_VERIFICATION = 5  # the sanitize action Exit Media Verification State


@dataclass(frozen=True, slots=True)
class ControllerInfo:
    """Capabilities of a controller.

    With ``format_all`` a format erases every namespace. With ``manages_namespaces`` a user can
    create, attach, detach and delete namespaces. With ``has_siblings`` the NVM subsystem may have
    other controllers. With ``manages_virtualization`` it may have secondary controllers.
    """

    methods: tuple[Method, ...]
    format_all: bool = False
    manages_namespaces: bool = False
    has_siblings: bool = False
    manages_virtualization: bool = False
    number: int = 0


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """Properties of a namespace.

    ``shared`` is True if other controllers can use the namespace. ``format_bits`` is its format,
    encoded for the command Format NVM.
    """

    shared: bool
    format_bits: int


def parse_controller(data: bytes) -> ControllerInfo:
    """Parse the Identify Controller data structure."""
    (oacs,) = struct.unpack_from("<H", data, _OACS)  # optional admin commands
    (sanicap,) = struct.unpack_from("<I", data, _SANICAP)  # sanitize capabilities
    (number,) = struct.unpack_from("<H", data, _CNTLID)  # controller id
    cmic, fna = data[_CMIC], data[_FNA]  # multi-path capabilities, attributes of Format NVM
    supported = {
        Method.SANITIZE_CRYPTO: sanicap & 0x1,
        Method.SANITIZE_BLOCK: sanicap & 0x2,
        Method.SANITIZE_OVERWRITE: sanicap & 0x4,
        # Bit 2: a format can erase the keys.
        Method.FORMAT_CRYPTO: oacs & 0x2 and fna & 0x4,
        Method.FORMAT_ERASE: oacs & 0x2,
    }
    return ControllerInfo(
        methods=tuple(method for method in Method if supported[method]),
        # Bit 0: a format applies to all namespaces. Bit 1: a secure erase does.
        format_all=bool(fna & 0x3),
        manages_namespaces=bool(oacs & 0x8),
        has_siblings=bool(cmic & 0x2),
        manages_virtualization=bool(oacs & 0x80),
        number=number,
    )


def parse_namespace(data: bytes) -> NamespaceInfo:
    """Parse the Identify Namespace data structure."""
    last_format = data[_NLBAF]
    flbas = data[_FLBAS]
    dps = data[_DPS]
    # The bits are defined only with more than 16 formats.
    upper = flbas >> 5 & 0x3 if last_format > 15 else 0
    # LBA format, metadata settings, protection information and its location, upper LBA format.
    format_bits = flbas & 0x1F | (dps & 0x7) << 5 | (dps >> 3 & 0x1) << 8 | upper << 12
    return NamespaceInfo(shared=bool(data[_NMIC] & 0x1), format_bits=format_bits)


def parse_controllers(data: bytes) -> set[int]:
    """Return the controller ids of a Controller List data structure."""
    (count,) = struct.unpack_from("<H", data)
    return set(struct.unpack_from(f"<{min(count, 2047)}H", data, 2))


def parse_idle_controllers(data: bytes) -> set[int]:
    """Return the ids of the offline controllers of a Secondary Controller List."""
    # The controller of a virtual function that is not enabled is offline.
    entries = [struct.unpack_from("<HHB", data, 32 * (n + 1)) for n in range(min(data[0], 127))]
    return {number for number, _, state in entries if not state & 0x1}


def parse_sanitize_status(data: bytes) -> tuple[SanitizeState, float]:
    """Return the state and the progress (0 to 1) of a Sanitize Status log.

    Raise DriverFailed for an unknown state.
    """
    progress, status = struct.unpack_from("<HH", data)
    state = _SANITIZE_STATES.get(status & 0x7)
    if state is None:
        raise DriverFailed(f"the controller reports the unknown sanitize status {status & 0x7}")
    if state is SanitizeState.RUNNING and data[36] & 0xF == _MEDIA_VERIFICATION:
        state = SanitizeState.VERIFYING
    return state, progress / _PROGRESS_UNITS


def permitted_methods(policies: Sequence[ErasePolicy]) -> tuple[Method, ...]:
    """Return the methods that policies permit, the preferred one first.

    The policies are in the order of preference, and the methods of each one are the strongest
    first. Without policies every method is permitted.
    """
    found = (method for policy in policies for method in _PERMITTED[policy])
    return tuple(dict.fromkeys(found)) or tuple(Method)


def find_mismatch(
    permitted: Sequence[Method], supported: Sequence[Method], *, exclusive: bool
) -> str | None:
    """Return why no permitted method can erase a controller, with a remedy.

    Return None if one can. ``exclusive`` is that of ``choose_method``.
    """
    usable = [method for method in supported if exclusive or method not in SANITIZE_METHODS]
    if set(usable) & set(permitted):
        return None
    if not usable:
        reason = (
            "supports neither Sanitize nor Format NVM"
            if exclusive
            else "shares its NVM subsystem with others and does not support Format NVM, which "
            "erases single namespaces"
        )
        return f"the controller {reason}: skip the device with a rule"
    # CLEAR permits each method.
    purges = set(usable) & set(_PERMITTED[ErasePolicy.PURGE])
    remedy = ErasePolicy.PURGE if purges else ErasePolicy.CLEAR
    return (
        f"its rule permits only: {'; '.join(permitted)}. The controller can be erased only by: "
        f"{'; '.join(usable)}. Permit that with {ERASE}={remedy}, or skip the device"
    )


def choose_method(
    controller: ControllerInfo,
    namespaces: Sequence[NamespaceInfo],
    *,
    exclusive: bool,
    permitted: Sequence[Method] = tuple(Method),
) -> Method:
    """Return the first of the permitted methods that erases no data of other users.

    ``exclusive`` means that no other controller of the NVM subsystem is in use: a sanitize
    operation erases the whole subsystem. Raise DriverFailed if there is no such method.
    """
    mismatch = find_mismatch(permitted, controller.methods, exclusive=exclusive)
    if mismatch is not None:
        raise DriverFailed(mismatch)
    usable = [method for method in permitted if method in controller.methods]
    if exclusive:
        return usable[0]
    if controller.format_all:
        raise DriverFailed(
            "Format NVM of this controller erases the namespaces of other controllers too"
        )
    if any(namespace.shared for namespace in namespaces):
        raise DriverFailed(
            "a namespace is shared with other controllers: attach private ones to this controller"
        )
    # There is one, or there would be a mismatch above.
    return next(method for method in usable if method not in SANITIZE_METHODS)


def read_methods(node: Path, number: str | None) -> tuple[Method, ...] | None:
    """Return the methods that a controller supports; None if they cannot be read.

    ``node`` is its character device, ``number`` the content of its file ``dev`` in sysfs: the node
    of another number belongs to another controller.
    """
    # It needs permission to read the node and, since the kernel permits few commands without it,
    # CAP_SYS_ADMIN (``nvme_cmd_allowed`` of ``drivers/nvme/host/ioctl.c``).
    try:
        with open_node(node, os.O_RDONLY, number) as descriptor:
            return Controller(descriptor).identify().methods
    except DriverFailed as exc:
        LOG.debug("The methods of erasure of %s are unknown: %s", node, exc.message)
        return None


class Controller:
    """Admin queue of a controller, opened as the file descriptor of its character device."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def identify(self) -> ControllerInfo:
        """Return the capabilities of the controller."""
        return parse_controller(self._identify(_CNS_CONTROLLER))

    def namespace_ids(self) -> list[int]:
        """Return the ids of the namespaces that are attached to the controller."""
        return self._namespaces(_CNS_ACTIVE_NAMESPACES)

    def allocated_namespace_ids(self) -> list[int]:
        """Return the ids of all namespaces of the NVM subsystem."""
        return self._namespaces(_CNS_ALLOCATED_NAMESPACES)

    def detached_namespace_ids(self) -> list[int]:
        """Return the ids of the namespaces of the NVM subsystem that no controller has."""
        others = set(self.allocated_namespace_ids()) - set(self.namespace_ids())
        return sorted(number for number in others if not self._has_controller(number))

    def is_alone(self, info: ControllerInfo) -> bool:
        """Return whether no other controller of the NVM subsystem can be in use."""
        # The others may be bound to vfio-pci, so sysfs does not show them. Only a controller with
        # virtualization management has secondary controllers, and the list of these.
        if not info.has_siblings:
            return True
        idle: set[int] = set()
        try:
            present = parse_controllers(self._identify(_CNS_CONTROLLERS))
            if info.manages_virtualization:
                idle = parse_idle_controllers(self._identify(_CNS_SECONDARY_CONTROLLERS))
        except DriverFailed:
            return False  # the list of controllers is optional: without it, others are assumed
        return present - idle <= {info.number}

    def identify_namespace(self, number: int) -> NamespaceInfo:
        """Return the properties of a namespace."""
        return parse_namespace(self._identify(_CNS_NAMESPACE, number))

    def sanitize_status(self) -> tuple[SanitizeState, float]:
        """Return the state of the most recent sanitize operation and its progress."""
        dwords = _LOG_BYTES // 4 - 1
        log = self._read(
            _GET_LOG_PAGE, _WHOLE_CONTROLLER, _SANITIZE_STATUS_LOG | dwords << 16, _LOG_BYTES
        )
        return parse_sanitize_status(log)

    def sanitize(self, method: Method) -> None:
        """Start a sanitize operation; it ends in the background."""
        self._execute(_SANITIZE, 0, _SANITIZE_ACTIONS[method], timeout=COMMAND_TIMEOUT)

    def end_verification(self) -> None:
        """Let the controller leave the media verification that follows a sanitize operation."""
        # Whoever started the operation, such as a server, may have required the verification.
        self._execute(_SANITIZE, 0, _END_VERIFICATION, timeout=COMMAND_TIMEOUT)

    def format(self, number: int, format_bits: int, method: Method, timeout: float) -> None:
        """Format a namespace; take ``format_bits`` from its NamespaceInfo."""
        self._execute(_FORMAT, number, format_bits | _SECURE_ERASE[method] << 9, timeout=timeout)

    def _has_controller(self, namespace: int) -> bool:
        try:
            found = parse_controllers(self._identify(_CNS_NAMESPACE_CONTROLLERS, namespace))
        except DriverFailed:
            return False  # the list is optional: without it, the namespace must be assumed detached
        return bool(found)

    def _namespaces(self, structure: int) -> list[int]:
        data = self._identify(structure)
        numbers = [number for (number,) in struct.iter_unpack("<I", data) if number]
        if len(numbers) == _IDENTIFY_BYTES // 4:
            raise DriverFailed(
                f"the controller has {len(numbers)} or more namespaces, which is too many"
            )
        return numbers

    def _identify(self, structure: int, namespace: int = 0) -> bytes:
        return self._read(_IDENTIFY, namespace, structure, _IDENTIFY_BYTES)

    def _read(self, opcode: int, namespace: int, dword10: int, size: int) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        self._execute(opcode, namespace, dword10, buffer, COMMAND_TIMEOUT)
        return buffer.raw

    def _execute(
        self,
        opcode: int,
        namespace: int,
        dword10: int,
        buffer: "ctypes.Array[ctypes.c_char] | None" = None,
        timeout: float = COMMAND_TIMEOUT,
    ) -> None:
        """Send an admin command; ``dword10`` is its first argument. Raise DriverFailed."""
        address, size = (0, 0) if buffer is None else (ctypes.addressof(buffer), len(buffer))
        words = (dword10, 0, 0, 0, 0, 0)
        # The fields are in the order of ``_COMMAND``. The kernel writes the result into its field.
        command = bytearray(
            _COMMAND.pack(
                *(opcode, 0, 0, namespace, 0, 0, 0, address, 0, size, *words),
                *(int(timeout * 1000), 0),
            )
        )
        try:
            status = fcntl.ioctl(self._descriptor, _ADMIN_IOCTL, command)
        except OSError as exc:
            raise DriverFailed(f"NVMe admin command {opcode:#04x}: {exc.strerror}") from exc
        if status:
            # Status code type in bits 10:8, status code in bits 7:0.
            raise DriverFailed(
                f"NVMe admin command {opcode:#04x} failed with status {status & 0x7FF:#x}"
            )
