# SPDX-License-Identifier: Apache-2.0
"""The privileged function that switches the MIG mode, on the simulated host."""

from pathlib import Path

import pytest

from cyborg.core.errors import DriverFailed, Invalid
from cyborg.drivers.kernel import nvml
from cyborg.drivers.privileged import mig
from cyborg.testing.vgpu_host import SimulatedVgpuHost
from cyborg.tests.unit.drivers.gpu.simulated_vgpus import CARD, SMALL

PROGRAM = "/usr/bin/nvidia-smi"
RESET = f"nvidia-smi --gpu-reset {CARD}"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedVgpuHost:
    found = SimulatedVgpuHost(tmp_path)
    found.add_card(CARD, (SMALL,), framebuffer=141, numvfs=8, needs_reset=True)
    found.redirect(monkeypatch.setattr)
    return found


@pytest.mark.parametrize("needs_reset", [True, False])
def test_set_mode_resets_only_a_card_whose_mode_is_pending(
    host: SimulatedVgpuHost, needs_reset: bool
) -> None:
    card = host.cards[CARD]
    card.needs_reset = needs_reset
    for enable in (True, True, False):
        mig.set_mode(CARD, enable, PROGRAM)
        assert (card.mig, card.pending_mig) == (enable, enable)
    assert host.commands == ([RESET] * 2 if needs_reset else [])


@pytest.mark.parametrize(
    ("failing", "error", "commands"),
    [
        ("mig 1", "cannot be changed to 1: In use by another client$", []),
        ("--gpu-reset", "to 1: reset required; nvidia-smi failed with 255: GPU Reset", [RESET]),
    ],
)
def test_set_mode_that_fails_requests_the_previous_mode_again(
    host: SimulatedVgpuHost, failing: str, error: str, commands: list[str]
) -> None:
    host.failing = {failing}
    with pytest.raises(DriverFailed, match=f"the MIG mode of {CARD} .*{error}"):
        mig.set_mode(CARD, True, PROGRAM)
    card = host.cards[CARD]
    assert (card.mig, card.pending_mig, host.commands) == (False, False, commands)


def test_set_mode_that_a_reset_does_not_activate_fails(
    host: SimulatedVgpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mig, "_run", lambda *arguments: None)
    with pytest.raises(DriverFailed, match=r"the mode is still pending after a reset$"):
        mig.set_mode(CARD, True, PROGRAM)
    monkeypatch.setattr(nvml, "request_mig_mode", lambda address, *, enable: "busy")
    with pytest.raises(DriverFailed, match=r"busy; the change stays pending: busy$"):
        mig.set_mode(CARD, True, PROGRAM)


def test_set_mode_whose_request_fails_after_the_write_is_withdrawn(
    host: SimulatedVgpuHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    def request(address: str, *, enable: bool) -> str | None:
        host.request_mig_mode(address, enable=enable)
        if enable:
            raise DriverFailed("the GPU is lost")
        return None

    monkeypatch.setattr(nvml, "request_mig_mode", request)
    with pytest.raises(DriverFailed, match=r"^the GPU is lost$"):
        mig.set_mode(CARD, True, PROGRAM)
    assert (host.cards[CARD].mig, host.cards[CARD].pending_mig) == (False, False)


def test_set_mode_of_a_card_with_virtual_functions_is_refused(host: SimulatedVgpuHost) -> None:
    host.manage_sriov(CARD, enable=True)
    with pytest.raises(DriverFailed, match="it has 8 virtual functions: disable SR-IOV first"):
        mig.set_mode(CARD, True, PROGRAM)
    with pytest.raises(DriverFailed, match="there is no NVIDIA GPU at 0000:41:00"):
        mig.set_mode("0000:41:00.1", True, PROGRAM)
    assert host.cards[CARD].pending_mig is False


def test_set_mode_of_a_card_with_gpu_instances_is_refused(host: SimulatedVgpuHost) -> None:
    mig.set_mode(CARD, True, PROGRAM)
    host.replace_instances(CARD, {"1g.18gb": 1})
    with pytest.raises(DriverFailed, match="has GPU instances: remove them first"):
        mig.set_mode(CARD, False, PROGRAM)
    assert host.cards[CARD].mig is True


def test_set_mode_of_a_card_that_a_guest_or_another_driver_has_is_refused(
    host: SimulatedVgpuHost,
) -> None:
    for driver in ("vfio-pci", None):
        folder = (host.bus / CARD).resolve()
        (folder / "driver").unlink()
        if driver is not None:
            (folder / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")
        with pytest.raises(DriverFailed, match=f"bound to {driver or 'no kernel driver'}; exp"):
            mig.set_mode(CARD, True, PROGRAM)
        (folder / "driver").touch()
    with pytest.raises(DriverFailed, match="there is no NVIDIA GPU at 0000:77:00"):
        mig.set_mode("0000:77:00.0", True, PROGRAM)


@pytest.mark.parametrize(
    "arguments",
    [
        ("..", True, PROGRAM),
        (CARD, 1, PROGRAM),
        (CARD, True, "nvidia-smi"),
        (CARD, True, "/usr/bin/sh"),
        (CARD, True, None),
    ],
)
def test_set_mode_malformed_argument_is_invalid(
    host: SimulatedVgpuHost, arguments: tuple[str, bool, str]
) -> None:
    with pytest.raises(Invalid):
        mig.set_mode(*arguments)
    assert host.cards[CARD].pending_mig is False
