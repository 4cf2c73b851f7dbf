# SPDX-License-Identifier: Apache-2.0
"""Privileged function of the gpu driver that switches the MIG mode of an NVIDIA card.

The order is that of "Configuring a GPU for MIG-Backed vGPUs" of NVIDIA's Virtual GPU Software User
Guide: the MIG mode, if it stays pending a reset of the GPU (``nvidia-smi --gpu-reset``), and only
then virtual functions. Cards of the generation Ampere need the reset, later ones do not ("Getting
Started with MIG" of the MIG User Guide), but with the driver for hosts the mode of later ones can
be pending too (NVIDIA/gpu-operator, pull request 2603). ``nvmlDeviceSetMigMode`` leaves a request
pending also if a process uses the card.
"""

from pathlib import Path

from cyborg.core.address import PciAddress
from cyborg.core.errors import DriverFailed, Invalid
from cyborg.drivers.host_use.check import mediated_parents, used_functions
from cyborg.drivers.kernel import nvml
from cyborg.drivers.privileged import CONTEXT, programs
from cyborg.drivers.privileged.pci import find_card
from cyborg.drivers.privileged.programs import resolve as _resolve
from cyborg.drivers.privileged.programs import run as _run
from cyborg.drivers.sysfs import Sysfs

_SYS = Path("/sys")
_PROGRAM = "nvidia-smi"
_RESET_TIMEOUT = 120.0  # seconds


@CONTEXT.entrypoint
def set_mode(address: str, enable: bool, program: str) -> None:
    """Switch the MIG mode of a card; reset it by ``nvidia-smi`` at a path if that is needed.

    Do nothing if the card has the mode. Raise DriverFailed before any change if the card is not
    bound to the kernel driver, has virtual functions, mediated devices or GPU instances, or is used
    by the host. Raise DriverFailed also if NVML or the reset fails; then the previous mode is
    requested again, and the error says so if this fails too.
    """
    function = str(PciAddress.parse(address))
    if type(enable) is not bool:
        raise Invalid(f"{enable!r} is neither true nor false", field="enable")
    if not programs.is_path_of(program, _PROGRAM):
        raise Invalid(f"{program!r} is not the absolute path of {_PROGRAM}", field="program")
    _check(function)
    error = f"the MIG mode of {function} cannot be changed to {int(enable)}"
    pending_reason: str | None = None
    try:
        pending_reason = nvml.request_mig_mode(function, enable=enable)
        if pending_reason is None:
            return
        error += f": {pending_reason}"
    except DriverFailed as exc:
        # NVML may have failed after the request.
        error = exc.message
    if pending_reason == nvml.RESET_REQUIRED:
        try:
            _run(
                [str(_resolve(program, _PROGRAM)), "--gpu-reset", "-i", function],
                {},  # no variables of the environment
                _RESET_TIMEOUT,
            )
            if nvml.request_mig_mode(function, enable=enable) is None:
                return
            error += "; the mode is still pending after a reset"
        except DriverFailed as exc:
            error += f"; {exc.message}"
    try:
        # Otherwise any later reset, such as that of a guest, would switch the mode.
        undo_error = nvml.request_mig_mode(function, enable=not enable)
    except DriverFailed as exc:
        undo_error = exc.message
    if undo_error is not None:
        stays = "may stay" if pending_reason is None else "stays"
        error += f"; the change {stays} pending: {undo_error}"
    raise DriverFailed(error)


def _check(function: str) -> None:
    """Raise DriverFailed unless the mode of the card at an address may be changed now."""
    card = find_card(
        Sysfs(_SYS), function, "NVIDIA GPU", vendor=nvml.NVIDIA, driver=nvml.KERNEL_DRIVER
    )
    reason: str | None = None
    if card.numvfs:
        reason = f"it has {card.numvfs} virtual functions: disable SR-IOV first"
    elif function in mediated_parents(_SYS):
        reason = "it has mediated devices, which servers may use"
    else:
        reason = used_functions(_SYS).get(function)
    if reason is not None:
        raise DriverFailed(f"the MIG mode of {function} cannot be changed: {reason}")
