# SPDX-License-Identifier: Apache-2.0
"""Random sequences of servers, other programs, changes of modes and boots on a card with vGPUs."""

import contextlib
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cyborg.core.errors import DriverFailed
from cyborg.drivers.base import VolatileMemory
from cyborg.drivers.gpu.driver import GpuDriver
from cyborg.testing.vgpu_host import SimulatedVgpuHost
from cyborg.tests.fixtures.machine.tiers import scale
from cyborg.tests.unit.drivers.gpu.simulated_vgpus import (
    CARD,
    TYPES,
    item,
    make_driver,
    make_host,
    offered,
)

RULE = f"address={CARD},type=H200X-35C|H200X-70C"
FUNCTIONS = st.integers(0, 7)
STEPS = st.one_of(
    st.tuples(st.just("prepare"), FUNCTIONS),
    st.tuples(st.just("release"), FUNCTIONS),
    st.tuples(st.just("start or stop the server"), FUNCTIONS),
    st.tuples(st.just("foreign 0"), FUNCTIONS),
    st.tuples(st.just("foreign 1"), FUNCTIONS),
    st.tuples(st.just("foreign 2"), FUNCTIONS),
    st.tuples(st.just("end foreign"), FUNCTIONS),
    st.tuples(st.just("switch mode"), FUNCTIONS),
    st.tuples(st.just("boot"), FUNCTIONS),
    st.tuples(st.just("restart agent"), FUNCTIONS),
)


class Sequence:
    """A host with a driver, and what servers and other programs have."""

    def __init__(self, folder: Path, set_attribute: object) -> None:
        self.host: SimulatedVgpuHost = make_host(folder)
        assert callable(set_attribute)
        self.host.redirect(set_attribute)
        self.memory = VolatileMemory()
        self.driver: GpuDriver = make_driver(self.host, RULE, memory=self.memory)
        self.bound: dict[str, str] = {}  # the type of each handle of a server
        self.foreign: dict[str, str] = {}  # the type of each function of another program

    def run(self, step: str, number: int) -> None:
        """Run a step if it is possible."""
        function = self.host.cards[CARD].functions[number]
        match step.split():
            case ["prepare"]:
                self.bind(1)
            case ["release"] if function in self.bound and function not in self.host.opened:
                self.driver.release(item(function))
                del self.bound[function]
            case ["release"] if function in self.bound:
                with pytest.raises(DriverFailed, match="may still be used"):
                    self.driver.release(item(function))
            case ["start", *_] if function in self.host.opened:
                self.host.close_function(function)
            case ["start", *_] if function in self.bound:
                self.host.open_function(function)
            case ["foreign", index] if function not in self.bound:
                with contextlib.suppress(OSError):
                    path = self.host.bus / function / "nvidia/current_vgpu_type"
                    self.host.write_attribute(path, str(TYPES[int(index)].id))
                    self.foreign[function] = TYPES[int(index)].name
            case ["end", "foreign"] if function in self.foreign:
                path = self.host.bus / function / "nvidia/current_vgpu_type"
                self.host.write_attribute(path, "0")
                del self.foreign[function]
            case ["switch", "mode"]:
                with contextlib.suppress(DriverFailed):
                    enable = not self.host.cards[CARD].heterogeneous
                    self.host.set_heterogeneous(CARD, enable=enable)
            case ["boot"]:
                self.host.reboot()
                self.foreign.clear()
                self.host.manage_sriov(CARD, enable=True)
                for handle, type_ in self.bound.items():
                    self.driver.prepare(item(handle, type_), None)
            case ["restart", "agent"]:
                self.driver = make_driver(self.host, RULE, memory=self.memory)

    def bind(self, count: int) -> None:
        """Prepare handles that are offered now and that no server has."""
        found = [(handle, d) for d, handles in offered(self.driver).items() for handle in handles]
        free = [(handle, d) for handle, d in found if handle not in self.bound]
        for handle, deployable in free[:count]:
            type_ = deployable.removeprefix(f"{CARD}-")
            self.driver.prepare(item(handle, type_), None)
            self.bound[handle] = type_

    def check(self) -> None:
        """Raise AssertionError if a server or another program lost what it has."""
        found = {
            h: d.removeprefix(f"{CARD}-") for d, hs in offered(self.driver).items() for h in hs
        }
        assert self.bound.items() <= found.items()
        assert not self.foreign.keys() & found.keys()
        for function, name in self.foreign.items():
            assert self.host.current(function) == name
        for function, type_ in self.bound.items():
            assert self.host.current(function).endswith(type_)


@pytest.mark.slow
@settings(max_examples=scale(80), deadline=None)
@given(st.lists(STEPS, max_size=12))
def test_sequence_keeps_what_servers_and_others_have(steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        sequence = Sequence(Path(folder), patch.setattr)
        sequence.check()
        for step, number in steps:
            sequence.run(step, number)
            sequence.check()
        # All handles that are offered at one time can be prepared.
        sequence.bind(len(TYPES) * 8)
        sequence.check()
