# SPDX-License-Identifier: Apache-2.0
"""Facts about NVIDIA GPUs from NVML, by the optional library ``nvidia-ml-py``.

NVIDIA documents the functions in the NVML API Reference Guide: ``nvmlDeviceGetUUID``,
``nvmlDeviceGetMemoryInfo``, ``nvmlDeviceGetEccMode``, ``nvmlDeviceGetVbiosVersion``,
``nvmlDeviceGetMigMode``, ``nvmlDeviceGetSupportedVgpus``, ``nvmlVgpuTypeGetName``,
``nvmlVgpuTypeGetMaxInstances``, ``nvmlVgpuTypeGetMaxInstancesPerGpuInstance``,
``nvmlVgpuTypeGetFramebufferSize``, ``nvmlDeviceGetVgpuHeterogeneousMode`` and
``nvmlDeviceSetVgpuHeterogeneousMode``; for MIG the section "Multi Instance GPU Management", with
``nvmlDeviceSetMigMode``: it succeeds although the mode could not be activated, and then the mode is
pending. Some cards describe their MIG profiles only in MIG mode
(``NVML_FI_DEV_IS_MIG_MODE_INDEPENDENT_MIG_QUERY_CAPABLE``).

NVML opens the device node of a GPU and keeps it open until ``nvmlShutdown``. While the node is
open, libvirt cannot unbind the GPU from its kernel driver, which it must do when a server gets the
GPU. So NVML is closed after each reading, and each GPU is read once. ``nv_pci_remove_helper`` of
``nv-pci.c`` of NVIDIA's open kernel modules waits until nobody has the node open.
"""

import contextlib
import ctypes
import importlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import not_
from typing import Any, NamedTuple, TypeVar

from cyborg.core.codec import Serializable, wire
from cyborg.core.errors import DriverFailed
from cyborg.core.inventory.device import MAX_TEXT
from cyborg.core.log import get_logger
from cyborg.drivers.kernel import nvlink
from cyborg.drivers.kernel.mig_placements import Placement, place
from cyborg.drivers.kernel.nvml_errors import ignored_if_unsupported, is_unsupported
from cyborg.drivers.sysfs import PciFunction

LOG = get_logger(__name__)

# The module of ``nvidia-ml-py``, which the extra ``nvml`` of this package installs.
MODULE = "pynvml"

# Vendor id of NVIDIA.
NVIDIA = "10de"

# Kernel driver with which NVML knows a GPU.
KERNEL_DRIVER = "nvidia"

# Seconds after which no other reading waits for the one that runs; less than a job waits for the
# lock of a card.
LOCK_TIMEOUT = 20.0

_clock = time.monotonic

# Why a mode is pending that a reset of the GPU makes current.
RESET_REQUIRED = "reset required"

# nvmlEnableState_t, NVML_DEVICE_MIG_DISABLE and _ENABLE; pynvml.py of nvidia-ml-py has the values.
ENABLED = "enabled"
_MODES: Mapping[int | None, str] = {0: "disabled", 1: ENABLED}


@dataclass(frozen=True, slots=True)
class GpuFacts(Serializable):
    """Facts about one GPU; facts that the GPU does not support are None.

    ``memory`` is in bytes. ``max_vgpus`` has the maximum number of vGPUs by type; a type is named
    without its product line, such as ``A40-12Q``. A GPU in MIG mode, and some others that can be in
    it, also have profiles of GPU instances, such as ``1g.10gb``: ``mig_profiles`` has the maximum
    number of instances by profile, ``mig_instances`` the current number by profile in MIG mode,
    empty if NVML may not list them, ``vgpu_profiles`` the profile that each type of MIG-backed vGPU
    needs, and ``vgpus_per_instance`` the maximum number of such vGPUs in one GPU instance.
    ``vgpu_names`` has the names of the types by their ids, ``vgpu_memory`` the framebuffer of each
    type in bytes. ``heterogeneous`` is whether vGPUs of different framebuffer sizes can exist at
    the same time; None if the GPU does not support this, also in MIG mode. ``mig_pending`` is
    whether a reset would switch the MIG mode.

    ``module`` is the module id of a GPU of a baseboard. ``nvlinks`` has the number of NVLinks to
    other GPUs by their PCI address, ``nvlink_speed`` the speed of one of them in megabytes per
    second.
    """

    uuid: str | None = None
    memory: int | None = None
    vbios: str | None = None
    ecc: str | None = None
    mig: str | None = None
    max_vgpus: Mapping[str, int] = field(default_factory=dict)
    mig_profiles: Mapping[str, int] = field(default_factory=dict)
    mig_instances: Mapping[str, int] = field(default_factory=dict)
    vgpu_profiles: Mapping[str, str] = field(default_factory=dict)
    # Left out where there are none: the facts in captures stay equal.
    module: int | None = field(default=None, metadata=wire(omit=not_))
    nvlinks: Mapping[str, int] = field(default_factory=dict, metadata=wire(omit=not_))
    nvlink_speed: int | None = field(default=None, metadata=wire(omit=not_))
    vgpus_per_instance: Mapping[str, int] = field(default_factory=dict)
    vgpu_names: Mapping[str, str] = field(default_factory=dict)
    vgpu_memory: Mapping[str, int] = field(default_factory=dict)
    heterogeneous: bool | None = None
    mig_pending: bool = field(default=False, metadata=wire(omit=not_))

    @property
    def in_mig_mode(self) -> bool:
        """Return whether the GPU is in MIG mode."""
        return self.mig == ENABLED

    @property
    def present_instances(self) -> dict[str, int]:
        """Return the current numbers of GPU instances by profile, without zeros."""
        return {profile: count for profile, count in self.mig_instances.items() if count}

    def max_vgpus_of(self, vgpu_type: str) -> int | None:
        """Return how many vGPUs of a type the GPU can have if it has no others; None if unknown.

        The GPU instances that exist now limit a type of MIG-backed vGPUs.
        """
        profile = self.vgpu_profiles.get(vgpu_type)
        if profile is None:
            return self.max_vgpus.get(vgpu_type)
        if self.in_mig_mode and not self.mig_instances:
            return None
        instances = self.mig_instances.get(profile, 0)
        # Drivers without this function of NVML have one vGPU for each GPU instance.
        return instances * self.vgpus_per_instance.get(vgpu_type, 1)


# Return the facts about the GPU at a PCI address; None if they cannot be read now.
ReadFacts = Callable[[str], GpuFacts | None]


class MigMode(NamedTuple):
    """The MIG mode of a GPU, as in ``GpuFacts``."""

    mig: str | None
    is_pending: bool


# Return the MIG mode of the GPU at a PCI address; None if it cannot be read now.
ReadMigMode = Callable[[str], MigMode | None]

_Read = TypeVar("_Read")


class NvmlLibrary:
    """Reader that uses NVML; it imports ``nvidia-ml-py`` at the first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # initialisation and shutdown are counted in the process
        self._end = math.inf  # when to stop waiting for the reading that runs now
        self._logged: set[str] = set()

    @staticmethod
    def is_installed() -> bool:
        """Return whether ``nvidia-ml-py`` is installed."""
        try:
            importlib.import_module(MODULE)
        except ImportError:
            return False
        return True

    def read(self, address: str) -> GpuFacts | None:
        """Return the facts, or None; log each different error once."""
        return self._call(_read, address)

    def read_mig_mode(self, address: str) -> MigMode | None:
        """Return the MIG mode, or None; log each different error once.

        The card is open for a shorter time than for all facts.
        """
        return self._call(_read_mig_mode, address)

    def _call(self, read: Callable[[Any, str], _Read], address: str) -> _Read | None:
        """Return what ``read`` returns, called with NVML and the address; None if it fails."""
        try:
            nvml = importlib.import_module(MODULE)
        except ImportError:
            return None  # the extra is not installed, which is a choice and not an error
        if self._acquire():
            try:
                with _opened(nvml):
                    return read(nvml, address)
            except nvml.NVMLError as exc:
                error = str(exc)
            finally:
                self._end = math.inf
                self._lock.release()
        else:
            error = "the reading of another GPU does not end"
        if error not in self._logged:
            self._logged.add(error)
            LOG.warning(
                "Cannot read NVML, the facts about the GPU are unknown: %s", error, device=address
            )
        return None

    def _acquire(self) -> bool:
        """Wait for other readings; return False if the one that runs has lasted LOCK_TIMEOUT."""
        # A card that hangs must not hang the jobs of the others, which have their cards locked.
        while not self._lock.acquire(timeout=min(LOCK_TIMEOUT, max(0.0, self._end - _clock()))):
            if self._end <= _clock():
                return False
        self._end = _clock() + LOCK_TIMEOUT
        return True


def is_known(card: PciFunction) -> bool:
    """Return whether NVML knows a card: a GPU of NVIDIA that is bound to its kernel driver."""
    return (card.vendor, card.kernel_driver, card.physfn) == (NVIDIA, KERNEL_DRIVER, None)


@contextlib.contextmanager
def _opened(nvml: Any) -> Iterator[None]:
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _require_nvml(error: str) -> Any:
    """Return the binding of NVML. Raise DriverFailed with an error without it."""
    try:
        return importlib.import_module(MODULE)
    except ImportError as exc:
        raise DriverFailed(f"{error}: nvidia-ml-py is missing") from exc


def set_heterogeneous(address: str, *, enable: bool) -> None:
    """Switch the mode for vGPUs of different sizes; see ``privileged.vgpu``."""
    nvml = _require_nvml(f"the heterogeneous mode of {address} cannot be changed")
    try:
        with _opened(nvml):
            device = nvml.nvmlDeviceGetHandleByPciBusId(address.encode())
            nvml.nvmlDeviceSetVgpuHeterogeneousMode(device, int(enable))
            # Before SR-IOV is enabled the mode does not change, and NVML may report success.
            current = nvml.nvmlDeviceGetVgpuHeterogeneousMode(device)
    except nvml.NVMLError as exc:
        raise DriverFailed(
            f"the heterogeneous mode of {address} cannot be changed to {int(enable)}: {exc}"
        ) from exc
    if current != int(enable):
        raise DriverFailed(
            f"the heterogeneous mode of {address} is {current} after a change to {int(enable)}"
        )


def request_mig_mode(address: str, *, enable: bool) -> str | None:
    """Switch the MIG mode of the GPU at an address; see ``privileged.mig``.

    Return None if the mode is current and no other one is pending, otherwise the reason why one is
    pending. Raise DriverFailed if NVML refuses the request, or the GPU has GPU instances that would
    be lost.
    """
    nvml = _require_nvml(f"the MIG mode of {address} cannot be changed")
    mode = nvml.NVML_DEVICE_MIG_ENABLE if enable else nvml.NVML_DEVICE_MIG_DISABLE
    try:
        with _opened(nvml):
            device = nvml.nvmlDeviceGetHandleByPciBusId(address.encode())
            requested = [mode, mode]  # the current mode and the pending one
            if nvml.nvmlDeviceGetMigMode(device) == requested:
                return None
            # Enabling the mode loses no GPU instance: these exist in MIG mode only.
            profiles = () if enable else _read_profiles(nvml, device).values()
            if any(_list_instances(nvml, device, profile) for profile in profiles):
                raise DriverFailed(f"{address} has GPU instances: remove them first")
            status = nvml.nvmlDeviceSetMigMode(device, mode)
            # The device may have been unbound or reset: its handle is not valid any more.
            device = nvml.nvmlDeviceGetHandleByPciBusId(address.encode())
            if nvml.nvmlDeviceGetMigMode(device) == requested:
                return None
    except nvml.NVMLError as exc:
        raise DriverFailed(
            f"the MIG mode of {address} cannot be changed to {int(enable)}: {exc}"
        ) from exc
    if status in (nvml.NVML_SUCCESS, nvml.NVML_ERROR_RESET_REQUIRED):
        return RESET_REQUIRED
    return str(nvml.NVMLError(status))


def format_instances(instances: Mapping[str, int]) -> str:
    """Return numbers of GPU instances as text, such as ``1x3g.71gb+4x1g.18gb``."""
    return "+".join(f"{count}x{profile}" for profile, count in instances.items()) or "none"


def replace_instances(address: str, instances: Mapping[str, int]) -> None:
    """Replace the MIG instances of the GPU at an address; see ``privileged.gpu``."""
    nvml = _require_nvml(f"{address} cannot be partitioned")
    try:
        with _opened(nvml):
            device = nvml.nvmlDeviceGetHandleByPciBusId(address.encode())
            current_mode, _ = nvml.nvmlDeviceGetMigMode(device)
            if current_mode != nvml.NVML_DEVICE_MIG_ENABLE:
                raise DriverFailed(f"{address} is not in MIG mode: enable it (nvidia-smi -mig 1)")
            profiles = _read_profiles(nvml, device)
            if unknown := sorted(instances.keys() - profiles):
                raise DriverFailed(
                    f"{address} has no MIG profile {unknown[0]}: expected one of "
                    f"{', '.join(profiles)}"
                )
            # Before any instance is destroyed: instances that do not fit change nothing.
            placed = _place_instances(nvml, device, instances, profiles)
            if placed is None:
                raise DriverFailed(
                    f"{address} has no room for the MIG instances {format_instances(instances)}"
                )
            for profile in profiles.values():
                for instance in _list_instances(nvml, device, profile):
                    _destroy(nvml, instance)
            for name, placement in placed:
                _create(nvml, device, profiles[name], placement)
    except nvml.NVMLError as exc:
        raise DriverFailed(
            f"the MIG instances of {address} could not be replaced by "
            f"{format_instances(instances)}: {exc}"
        ) from exc


def _read_profiles(nvml: Any, device: Any) -> dict[str, Any]:
    """Return the profiles of GPU instances that the GPU supports, by name."""
    profiles: dict[str, Any] = {}
    for number in range(nvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        with ignored_if_unsupported(nvml):
            info = nvml.nvmlDeviceGetGpuInstanceProfileInfo(device, number)
            # NVML writes "MIG 1g.10gb".
            profiles.setdefault(short_name(_text(info.name)), info)
    return profiles


def _list_instances(nvml: Any, device: Any, profile: Any) -> list[Any]:
    count = ctypes.c_uint(profile.instanceCount)
    instances = (nvml.c_nvmlGpuInstance_t * max(1, profile.instanceCount))()
    nvml.nvmlDeviceGetGpuInstances(device, profile.id, instances, ctypes.byref(count))
    return list(instances[: count.value])


def _place_instances(
    nvml: Any, device: Any, instances: Mapping[str, int], profiles: Mapping[str, Any]
) -> Sequence[tuple[str, Placement | None]] | None:
    """Return the profile and the placement of each instance, or None if they do not fit.

    All placements are None if NVML does not list those of a profile.
    """
    possible: dict[str, list[Placement]] = {}
    with ignored_if_unsupported(nvml):
        for name in instances:
            count = ctypes.c_uint()
            arguments = (device, profiles[name].id)
            list_placements = nvml.nvmlDeviceGetGpuInstancePossiblePlacements
            list_placements(*arguments, None, ctypes.byref(count))
            found = (nvml.c_nvmlGpuInstancePlacement_t * count.value)()
            list_placements(*arguments, found, ctypes.byref(count))
            possible[name] = [Placement(item.start, item.size) for item in found[: count.value]]
    if all(map(possible.get, instances)):
        return place(instances, possible)
    # The largest first: small ones can leave no contiguous slices for them.
    names = sorted(instances, key=lambda name: -profiles[name].sliceCount)
    return [(name, None) for name in names for _ in range(instances[name])]


def _destroy(nvml: Any, instance: Any) -> None:
    """Destroy a GPU instance with its compute instances."""
    for number in range(nvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        try:
            info = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(
                instance, number, nvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
            )
        except nvml.NVMLError:
            continue  # the instance has no such profile
        count = ctypes.c_uint(info.instanceCount)
        compute_instances = (nvml.c_nvmlComputeInstance_t * max(1, info.instanceCount))()
        nvml.nvmlGpuInstanceGetComputeInstances(
            instance, info.id, compute_instances, ctypes.byref(count)
        )
        for compute in compute_instances[: count.value]:
            nvml.nvmlComputeInstanceDestroy(compute)
    nvml.nvmlGpuInstanceDestroy(instance)


def _create(nvml: Any, device: Any, profile: Any, placement: Placement | None) -> None:
    """Create a GPU instance with one compute instance that uses all slices of the GPU instance.

    Without a placement, the kernel driver chooses one. A GPU instance whose compute instance cannot
    be created remains: each change begins with the removal of all instances.
    """
    if placement is None:
        instance = nvml.nvmlDeviceCreateGpuInstance(device, profile.id)
    else:
        location = nvml.c_nvmlGpuInstancePlacement_t(*placement)
        instance = nvml.nvmlDeviceCreateGpuInstanceWithPlacement(
            device, profile.id, ctypes.byref(location)
        )
    for number in range(nvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        with ignored_if_unsupported(nvml):  # the instance has no such profile
            info = nvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(
                instance, number, nvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
            )
            if info.sliceCount == profile.sliceCount:
                break  # this profile has all slices
    else:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_FOUND)
    nvml.nvmlGpuInstanceCreateComputeInstance(instance, info.id)


def short_name(vgpu_type: str) -> str:
    """Return the name of a vGPU type without its product line: A40-12Q of ``NVIDIA A40-12Q``."""
    # NVML and the file ``name`` of a mediated device type use different product lines for one type.
    return (vgpu_type.split() or [""])[-1]


def _read_mig_mode(nvml: Any, address: str) -> MigMode:
    """Return the MIG mode of a GPU. Raise NVMLError if NVML does not know it, or it has none."""
    device = nvml.nvmlDeviceGetHandleByPciBusId(address.encode())
    current, pending = nvml.nvmlDeviceGetMigMode(device)
    return MigMode(_MODES.get(current), current != pending)


def _read(nvml: Any, address: str) -> GpuFacts:
    """Return the facts about a GPU. Raise NVMLError if NVML does not know it, or fails."""
    device = nvml.nvmlDeviceGetHandleByPciBusId(address.encode())

    def get(function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a function of NVML; None if it is not supported."""
        try:
            return function(*arguments)
        except nvml.NVMLError as exc:
            if not is_unsupported(exc):
                raise
            return None

    ecc, _ = get(nvml.nvmlDeviceGetEccMode, device) or (None, None)
    mig, pending_mig = get(nvml.nvmlDeviceGetMigMode, device) or (None, None)
    memory = get(nvml.nvmlDeviceGetMemoryInfo, device)
    in_mig_mode = mig == nvml.NVML_DEVICE_MIG_ENABLE
    profiles = {} if mig is None else _read_profiles(nvml, device)
    # Without the right to list them they are unknown, and the other facts hold.
    listed = {
        name: get(_list_instances, nvml, device, info)
        for name, info in profiles.items()
        if in_mig_mode
    }
    names = {info.id: name for name, info in profiles.items()}
    limits: dict[str, int] = {}
    vgpu_profiles: dict[str, str] = {}
    per_instance: dict[str, int] = {}
    vgpu_names: dict[str, str] = {}
    vgpu_memory: dict[str, int] = {}
    heterogeneous = get(nvml.nvmlDeviceGetVgpuHeterogeneousMode, device)
    for vgpu_type in get(nvml.nvmlDeviceGetSupportedVgpus, device) or ():
        name = short_name(_text(get(nvml.nvmlVgpuTypeGetName, vgpu_type)))
        limit = get(nvml.nvmlVgpuTypeGetMaxInstances, device, vgpu_type)
        # The type of a vGPU that is not MIG-backed has the id of no profile.
        profile_id = get(nvml.nvmlVgpuTypeGetGpuInstanceProfileId, vgpu_type)
        if not name:
            continue  # all facts about types are by name
        vgpu_names[str(int(vgpu_type))] = name
        if size := get(nvml.nvmlVgpuTypeGetFramebufferSize, vgpu_type):
            vgpu_memory[name] = int(size)
        if limit:
            limits[name] = int(limit)
        if profile_id in names:
            vgpu_profiles[name] = names[profile_id]
            if limit := get(nvml.nvmlVgpuTypeGetMaxInstancesPerGpuInstance, vgpu_type):
                per_instance[name] = int(limit)
    return GpuFacts(
        uuid=_text(get(nvml.nvmlDeviceGetUUID, device)) or None,
        memory=None if memory is None else int(memory.total),
        vbios=_text(get(nvml.nvmlDeviceGetVbiosVersion, device)) or None,
        ecc=_MODES.get(ecc),
        mig=_MODES.get(mig),
        max_vgpus=limits,
        mig_profiles={name: int(info.instanceCount) for name, info in profiles.items()},
        mig_instances={name: len(found) for name, found in listed.items() if found is not None},
        vgpu_profiles=vgpu_profiles,
        module=nvlink.read_module(nvml, device),
        nvlinks=nvlink.read_links(nvml, device),
        nvlink_speed=nvlink.read_speed(nvml, device),
        vgpus_per_instance=per_instance,
        vgpu_names=vgpu_names,
        vgpu_memory=vgpu_memory,
        heterogeneous=None if heterogeneous is None else bool(heterogeneous),
        mig_pending=mig != pending_mig,
    )


def _text(value: str | bytes | None) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else value or ""
    return text[:MAX_TEXT]
