# SPDX-License-Identifier: Apache-2.0
"""The client of Fabric Manager, with the double of its library."""

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cyborg.core.errors import DriverFailed
from cyborg.drivers.base import VolatileMemory
from cyborg.drivers.gpu.fabric.manager import LATE_SECONDS, FabricManager
from cyborg.drivers.gpu.fabric.requests import FabricRequests
from cyborg.testing.fabric_manager import FabricManagerDouble, Programs
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.fixtures.machine.tiers import sample, scale
from cyborg.tests.unit.drivers.full_memory import FullMemory
from cyborg.tests.unit.drivers.gpu.fabric.test_requests import H100

pytestmark = [pytest.mark.requires("compiler"), pytest.mark.slow]

VFS = ("0000:41:00.4", "0000:b8:00.5")


@pytest.fixture
def memory() -> VolatileMemory:
    return VolatileMemory()


@pytest.fixture
def manager(sdk: FabricRequests, memory: VolatileMemory) -> FabricManager:
    return FabricManager(sdk, lambda: memory)


def active(manager: FabricManager) -> list[int]:
    state = manager.read()
    assert state.problem is None
    return [partition.id for partition in state.partitions if partition.is_active]


def test_activate_active_partition_is_success(
    manager: FabricManager, double: FabricManagerDouble
) -> None:
    manager.activate(3)
    manager.activate(3)
    assert active(manager) == [3]
    double.set("active", "4")  # by NVIDIA's hook for libvirt
    manager.activate(4)
    assert active(manager) == [4]


def test_activate_overlapping_partition_names_the_active_one(manager: FabricManager) -> None:
    manager.activate(3)
    manager.activate(14)
    message = (
        r"partition 0 \(GPUs 1 2 3 4 5 6 7 8\) overlaps the active partition 3 \(GPUs 1 3\), 14"
    )
    with pytest.raises(DriverFailed, match=message):
        manager.activate(0)
    assert active(manager) == [3, 14]


def test_activate_lost_race_for_the_same_partition_is_success(
    manager: FabricManager, double: FabricManagerDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    activate = FabricRequests.activate

    def lose(requests: FabricRequests, number: int, functions: tuple[str, ...]) -> None:
        double.set("active", "3")  # by another client, since the list was read
        activate(requests, number, functions)

    monkeypatch.setattr(FabricRequests, "activate", lose)
    manager.activate(3)
    assert active(manager) == [3]
    with pytest.raises(DriverFailed, match=r"partition 1 .* overlaps the active partition 3 "):
        manager.activate(1)


def test_activate_unknown_partition_lists_the_known_ones(manager: FabricManager) -> None:
    with pytest.raises(DriverFailed, match="has no partition 15, found 0, 1, 2, "):
        manager.activate(15)


def test_activate_with_functions_again_needs_the_same(
    manager: FabricManager, double: FabricManagerDouble, sdk: FabricRequests, memory: VolatileMemory
) -> None:
    double.set("mode", 2)
    manager.activate(3, VFS)
    manager.activate(3, VFS)
    restarted = FabricManager(sdk, lambda: memory)
    restarted.activate(3, VFS)
    with pytest.raises(DriverFailed, match=f"functions {VFS[0]}, {VFS[1]}, expected {VFS[1]}"):
        restarted.activate(3, VFS[::-1])
    with pytest.raises(DriverFailed, match="has 2 GPUs and needs a virtual function of each"):
        restarted.activate(3, VFS[:1])
    with pytest.raises(DriverFailed, match="'41:00' is not a PCI address"):
        restarted.activate(3, ("41:00", VFS[1]))
    foreign = FabricManager(sdk, VolatileMemory)
    with pytest.raises(DriverFailed, match="functions of another client, expected"):
        foreign.activate(3, VFS)
    assert double.active == {3: VFS}


def test_deactivate_partition_of_another_program_is_refused(
    manager: FabricManager, double: FabricManagerDouble
) -> None:
    double.set("active", "4")
    with pytest.raises(DriverFailed, match=r"another program activated it.*fmpm -d 4"):
        manager.deactivate(4)
    assert active(manager) == [4]


def test_deactivate_inactive_or_unknown_partition_is_success(
    manager: FabricManager, double: FabricManagerDouble
) -> None:
    manager.activate(3)
    for _ in range(2):
        manager.deactivate(3)
    manager.deactivate(15)
    assert double.active == {}
    manager.activate(3)
    double.set("fail", "fmDeactivateFabricPartition -4 1")  # another client was first
    manager.deactivate(3)
    manager.activate(3)
    double.set("fail", "fmDeactivateFabricPartition -10 1")
    with pytest.raises(DriverFailed, match="NVLINK_ERROR"):
        manager.deactivate(3)


STATES = [
    ("phase", "stopped", "cannot be reached .*: start nvidia-fabricmanager"),
    ("phase", "starting", "is starting, or waits .*: wait a minute"),
    ("mode", 0, "is not in the mode .*: set FABRIC_MODE=1 for whole GPUs, or 2"),
    ("internal", 1, "does not serve requests .*: use the address of FM_CMD_BIND_INTERFACE"),
    ("fail", "fmConnect -6 0", "different versions .*: install nvidia-fabricmanager"),
    ("fail", "fmGetSupportedFabricPartitions -10 0", "could not train the NVLinks"),
    ("fail", "fmGetSupportedFabricPartitions -5 0", "timed out at a GPU"),
    ("fail", "fmGetSupportedFabricPartitions -99 0", "unknown, -99"),
    ("crash", "fmGetSupportedFabricPartitions", "ended with -6 in list"),
]
# One that Fabric Manager is in, one that it returns, and one of the program of a request.
USUAL_STATES = [STATES[0], STATES[6], STATES[8]]


@pytest.mark.parametrize(("key", "value", "problem"), sample(STATES, *USUAL_STATES))
def test_read_in_another_state_returns_problem_and_last_partitions(
    manager: FabricManager, double: FabricManagerDouble, key: str, value: object, problem: str
) -> None:
    partitions = manager.read().partitions
    double.set(key, value)
    state = manager.read()
    assert state.partitions == partitions
    with pytest.raises(AssertionError if state.problem is None else DriverFailed, match=problem):
        manager.activate(3)
    assert double.active == {}
    with pytest.raises(DriverFailed, match=problem):
        manager.deactivate(3)


def test_read_without_service_at_the_first_time_has_no_partitions(
    manager: FabricManager, double: FabricManagerDouble
) -> None:
    double.stop()
    state = manager.read()
    assert state.partitions == ()
    assert state.problem is not None


def test_read_after_a_hang_is_bounded(
    sdk: FabricRequests, double: FabricManagerDouble, memory: VolatileMemory
) -> None:
    manager = FabricManager(replace(sdk, timeout=0.5), lambda: memory)
    double.set("hang", "fmGetSupportedFabricPartitions 30")
    problem = manager.read().problem
    assert problem is not None
    assert "did not complete list within 0.5 s" in problem
    double.set("hang")
    # On a busy machine one more read may take longer than the timeout.
    wait_until("it answers", lambda: manager.read().problem is None)


@pytest.mark.parametrize("active", [(), (3,)])
def test_without_a_record_no_partition_is_activated(
    sdk: FabricRequests, double: FabricManagerDouble, active: tuple[int, ...]
) -> None:
    memory = FullMemory()
    manager = FabricManager(sdk, lambda: memory)
    double.set("active", *active)  # by another program
    with pytest.raises(DriverFailed, match=r"cannot be recorded.*: free space in the state_path"):
        manager.activate(3)
    assert tuple(double.active) == active
    state = manager.read()
    assert "cannot be recorded" in str(state.problem)
    assert state.own == frozenset()
    memory.is_full = False
    assert manager.read().problem is None
    manager.activate(3)
    memory.is_full = True
    manager.deactivate(3)  # a release needs no record: the last one has the partition as active
    assert double.active == {}


def test_activate_during_a_hanging_request_fails(
    sdk: FabricRequests, double: FabricManagerDouble, memory: VolatileMemory
) -> None:
    manager = FabricManager(replace(sdk, timeout=0.2), lambda: memory)
    lock = manager._lock
    with lock, pytest.raises(DriverFailed, match="has not completed earlier requests"):
        manager.activate(3)
    assert double.active == {}


def test_read_after_restart_sends_the_active_partitions(
    sdk: FabricRequests, manager: FabricManager, double: FabricManagerDouble, memory: VolatileMemory
) -> None:
    manager.activate(3)
    manager.activate(4)
    manager.deactivate(4)
    double.set("active", "3", "14")  # another client activated one too
    manager.read()
    double.stop()
    assert manager.read().problem is not None
    double.start(restart=True)
    assert active(FabricManager(sdk, lambda: memory)) == [3, 14]
    assert double.values("cut") == []
    assert double.values("phase") == ["running"]


def test_deactivate_after_restart_sends_the_active_partitions_first(
    manager: FabricManager, double: FabricManagerDouble
) -> None:
    manager.activate(3)
    manager.activate(4)
    double.start(restart=True)
    manager.deactivate(3)
    assert double.active == {4: ()}
    assert double.values("cut") == []


def test_read_after_restart_without_known_state_sends_nothing(
    manager: FabricManager, double: FabricManagerDouble, memory: VolatileMemory
) -> None:
    double.set("active", "3")
    double.start(restart=True)
    for text in (None, "{", json.dumps({"partitions": [{"id": 3}]})):
        memory.put(f"fabric:{double.address}", text)
        problem = manager.read().problem
        assert problem is not None
        assert "waits for the list of active partitions" in problem
    assert double.active == {3: ()}
    manager.set_activated([3])
    assert active(manager) == [3]


def test_read_after_restart_by_fmpm_says_that_it_cannot_send_the_list(
    fmpm: FabricRequests, double: FabricManagerDouble, memory: VolatileMemory
) -> None:
    manager = FabricManager(fmpm, lambda: memory)
    manager.activate(3)
    double.start(restart=True)
    problem = manager.read().problem
    assert problem is not None
    assert "cannot send the list of active partitions" in problem
    assert double.values("cut") == []


def test_activate_that_ends_after_its_request_is_sent_after_restart(
    sdk: FabricRequests, double: FabricManagerDouble, memory: VolatileMemory
) -> None:
    manager = FabricManager(sdk, lambda: memory)
    double.set("crash", "fmActivateFabricPartition")
    with pytest.raises(DriverFailed, match="ended with"):
        manager.activate(3)
    double.set("crash")
    double.set("active", "3")  # the request had arrived
    double.start(restart=True)
    assert active(manager) == [3]
    assert double.values("cut") == []


def test_refused_partition_is_not_sent_after_restart(
    manager: FabricManager, double: FabricManagerDouble
) -> None:
    manager.activate(4)
    double.set("fail", "fmActivateFabricPartition -10 1")
    with pytest.raises(DriverFailed, match="NVLINK_ERROR"):
        manager.activate(3)
    double.start(restart=True)
    assert active(manager) == [4]


def test_deactivated_partition_is_not_sent_after_restart(
    manager: FabricManager, double: FabricManagerDouble
) -> None:
    for number in (4, 5):
        manager.activate(number)
    manager.deactivate(5)
    double.start(restart=True)
    assert active(manager) == [4]


def test_read_tells_own_partitions_from_those_of_others(
    manager: FabricManager, double: FabricManagerDouble
) -> None:
    double.set("active", "3", "5")  # by another program
    assert manager.read().own == set()
    manager.activate(3)  # that program has activated it for our server
    manager.activate(4)
    assert manager.read().own == {3, 4}
    double.start()  # a reboot of the host: they are to be activated again
    assert manager.read().own == set()
    manager.deactivate(3)
    manager.activate(4)
    assert manager.read().own == {4}
    manager.deactivate(4)
    assert manager.read().own == set()


def test_partition_that_was_inactive_is_no_longer_own(
    manager: FabricManager, double: FabricManagerDouble
) -> None:
    manager.activate(3)
    assert manager.read().own == {3}
    double.set("active")  # a reboot of the host, or fmpm -d
    manager.read()
    double.set("active", "3")  # NVIDIA's hook for libvirt, before it starts a guest
    assert manager.read().own == set()
    with pytest.raises(DriverFailed, match="another program activated it"):
        manager.deactivate(3)
    assert set(double.active) == {3}


def test_activation_that_completes_late_is_own_for_a_limited_time(
    sdk: FabricRequests, double: FabricManagerDouble, memory: VolatileMemory
) -> None:
    now = [0.0]

    def restart() -> FabricManager:
        return FabricManager(sdk, lambda: memory, clock=lambda: now[0])

    for seconds, own in ((0.0, {3}), (LATE_SECONDS - 1, {3}), (LATE_SECONDS, set())):
        now[0] = 0.0
        double.set("fail", "fmActivateFabricPartition -10 1")
        with pytest.raises(DriverFailed, match="NVLINK_ERROR"):
            restart().activate(3)
        # The release of the failed request comes first, and finds nothing to deactivate.
        restart().deactivate(3)
        now[0] = seconds
        double.set("active", "3")
        manager = restart()
        assert manager.read().own == own
        now[0] = 2 * LATE_SECONDS
        assert manager.read().own == own, "it was seen active in time"
        if own:
            manager.deactivate(3)
            assert double.active == {}
        else:
            double.set("active")
    # A later request that succeeds ends the doubt about an earlier one.
    double.set("fail", "fmActivateFabricPartition -10 1")
    with pytest.raises(DriverFailed, match="NVLINK_ERROR"):
        restart().activate(3)
    restart().activate(3)
    now[0] += LATE_SECONDS
    assert restart().read().own == {3}


def test_activation_that_completes_late_has_its_functions(
    manager: FabricManager, double: FabricManagerDouble
) -> None:
    functions = ["0000:01:00.4", "0000:02:00.4"]
    double.set("fail", "fmActivateFabricPartitionWithVFs -10 1")
    with pytest.raises(DriverFailed, match="NVLINK_ERROR"):
        manager.activate(4, functions)
    assert active(manager) == []
    double.set("active", "4")
    assert active(manager) == [4]
    manager.activate(4, functions)
    with pytest.raises(DriverFailed, match=r"is active with the virtual functions 0000:01:00\.4"):
        manager.activate(4, [*functions[:1], "0000:02:00.5"])


def test_read_without_fabric_manager_has_the_last_own_partitions(
    manager: FabricManager, double: FabricManagerDouble
) -> None:
    manager.activate(3)
    double.stop()
    state = manager.read()
    assert state.problem is not None
    assert state.own == {3}


# The decision without processes: test_activate_lost_race_for_the_same_partition_is_success.
@pytest.mark.matrix
def test_two_processes_at_once_activate_one_of_two_overlapping_partitions(
    manager: FabricManager, double: FabricManagerDouble, programs: Programs
) -> None:
    script = (
        "import sys\n"
        "from cyborg.core.errors import DriverFailed\n"
        "from cyborg.drivers.base import VolatileMemory\n"
        "from cyborg.drivers.gpu.fabric.manager import FabricManager\n"
        "from cyborg.drivers.gpu.fabric.requests import FabricRequests\n"
        "requests = FabricRequests(sys.argv[1], library=sys.argv[2])\n"
        "memory = VolatileMemory()\n"
        "manager = FabricManager(requests, lambda: memory)\n"
        "for _ in range(10):\n"
        "    try:\n"
        "        manager.activate(1)\n"
        "        manager.deactivate(1)\n"
        "    except DriverFailed as exc:\n"
        "        assert 'overlaps' in str(exc) or 'IN_USE' in str(exc), exc\n"
    )
    command = [sys.executable, "-c", script, double.address, str(programs.library)]
    with subprocess.Popen(command) as other:
        won = 0
        while other.poll() is None:
            try:
                manager.activate(3)
            except DriverFailed as exc:
                assert "overlaps" in str(exc) or "IN_USE" in str(exc), exc
            else:
                won += 1
                assert 1 not in double.active
                manager.deactivate(3)
    assert other.returncode == 0
    assert won > 0


def test_threads_of_one_agent_keep_their_partitions(
    manager: FabricManager, double: FabricManagerDouble
) -> None:
    def work(number: int) -> None:
        for _ in range(scale(8)):
            manager.activate(number)
            manager.deactivate(number)
        manager.activate(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in (3, 4, 5, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    double.start(restart=True)
    assert active(manager) == [3, 4, 5, 6], "none is missing in the memory"


# Steps that the tests above make too, in any order.
@pytest.mark.matrix
@settings(
    max_examples=scale(64),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["activate", "deactivate", "restart"]), st.integers(0, 15)),
        min_size=1,
        max_size=8,
    )
)
def test_random_steps_keep_to_the_model(
    programs: Programs, tmp_path: Path, steps: list[tuple[str, int]]
) -> None:
    double = FabricManagerDouble(tmp_path / "model")
    memory = VolatileMemory()
    requests = FabricRequests(double.address, library=str(programs.library), command="none")
    model: set[int] = set()
    for verb, number in steps:
        manager = FabricManager(requests, lambda: memory)  # a restarted agent
        overlapping = {n for n in model - {number} if {*H100[n]} & {*H100.get(number, ())}}
        if verb == "restart":
            double.start(restart=True)
        elif verb == "deactivate":
            manager.deactivate(number)
            model.discard(number)
        elif number not in H100 or overlapping:
            with pytest.raises(DriverFailed):
                manager.activate(number)
        else:
            manager.activate(number)
            model.add(number)
        if verb != "restart" or memory.get(f"fabric:{double.address}") is not None:
            assert active(manager) == sorted(model)
        else:
            double.start()  # nothing was known, and nothing was active
    modules = [module for number in double.active for module in H100[number]]
    assert len(modules) == len(set(modules)), "two active partitions have a common GPU"
    assert double.values("cut") == []
