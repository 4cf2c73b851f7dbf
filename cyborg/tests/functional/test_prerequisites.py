# SPDX-License-Identifier: Apache-2.0
"""Tests on a machine without prerequisites: each one missing, then all of them.

Each test starts pytest with a PATH without some programs, or with the address of an unreachable
server, and reads the results: skipped with the reason, no failure, no error.
"""

import os
import shutil
import subprocess
import sys
import venv
import xml.etree.ElementTree as tree
from dataclasses import dataclass
from pathlib import Path

import pytest

from cyborg.tests.fixtures.machine import guest, prerequisites
from cyborg.tests.fixtures.machine.tiers import sample

ROOT = prerequisites.ROOT
LONG = pytest.mark.long
FUNCTIONAL, LAB, UNIT = (f"cyborg/tests/{name}" for name in ("functional", "lab", "unit"))
TESTED_DB = f"{UNIT}/db/test_engine.py"
# No server listens on port 1.
NO_SERVICES = {
    "CYBORG_TEST_MYSQL": "mysql+pymysql://root@127.0.0.1:1/",
    "CYBORG_TEST_POSTGRESQL": "postgresql+psycopg2://postgres@127.0.0.1:1/postgres",
    "CYBORG_TEST_RABBIT": "rabbit://guest:guest@127.0.0.1:1/",
}
UNREACHABLE = {
    "CYBORG_TEST_MYSQL": "no mysql server at mysql+pymysql",
    "CYBORG_TEST_POSTGRESQL": "no postgresql server at postgresql+psycopg2",
    "CYBORG_TEST_RABBIT": "no RabbitMQ at amqp://guest",
}
# The lab also searches system folders outside PATH.
PLUGIN = """
from pathlib import Path
from cyborg.tests.fixtures.machine import guest

guest.SBIN = ""
guest.MODULES, guest.BOOT = Path({modules!r}), Path({boot!r})
"""
# When the plug-ins of the tests are imported.
NO_PACKAGES = """
def pytest_configure():
    from cyborg.tests.fixtures.machine import prerequisites

    prerequisites.PROGRAMS = Path("/nonexistent")
"""


@dataclass(frozen=True)
class Run:
    """The result of a pytest run: the reasons of skips, and the number of other tests."""

    code: int
    reasons: list[str]
    others: int
    output: str


class Machine:
    """A machine with only these programs. Those of the lab, and its kernel, are stubs."""

    def __init__(self, folder: Path, without: str = "") -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.env = {"PATH": str(self.bin), "PYTHONPATH": str(folder), "HOME": str(folder)}
        modules, boot = folder / "modules", folder / "boot"
        for path in (modules / "6.1.0-1-amd64", boot):
            path.mkdir(parents=True)
        for name in {*guest.PROGRAMS} - {without}:
            self.add(name, "exit 0")
        if without != "kernel":
            (boot / "vmlinuz-6.1.0-1-amd64").touch()
        (folder / "elsewhere.py").write_text(PLUGIN.format(modules=str(modules), boot=str(boot)))

    def add(self, name: str, script: str) -> None:
        """Add a program."""
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def call(self, *words: object, **env: str) -> "subprocess.CompletedProcess[str]":
        """Run a command of this environment on the machine."""
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("CYBORG_TEST_REQ", "GIT_"))
        }
        return subprocess.run(
            [str(word) for word in words],
            cwd=ROOT,
            env={**environment, **self.env, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )

    def pytest(self, *words: str, python: object = sys.executable, **env: str) -> Run:
        """Run pytest; fixtures are set up unless the arguments disable that."""
        record = self.folder / "record.xml"
        process = self.call(
            *(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "elsewhere"),
            *(f"--junitxml={record}", f"--basetemp={self.folder / 'tmp'}", *words),
            **env,
        )
        cases = list(tree.parse(record).iter("testcase")) if record.exists() else []
        skips = [part.get("message", "") for case in cases for part in case.iterfind("skipped")]
        return Run(
            process.returncode, skips, len(cases) - len(skips), process.stdout + process.stderr
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a machine with the prerequisites of the lab only."""
    return Machine(tmp_path)


def check_all_skipped(run: Run, words: str) -> None:
    """Check that every test was skipped, for a reason with these words."""
    assert (run.code, run.others) == (0, 0), run.output
    assert run.reasons, run.output
    assert [reason for reason in run.reasons if words not in reason] == []


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name", sample([*guest.PROGRAMS, "kernel"], "qemu-system-x86_64", "kernel", mark=LONG)
)
def test_lab_without_one_part_is_skipped(name: str, tmp_path: Path) -> None:
    """Module fixtures must not start a guest without a kernel."""
    machine = Machine(tmp_path, without=name)
    package = guest.PROGRAMS.get(name, "linux-image-amd64")
    check_all_skipped(machine.pytest(LAB, "--setup-only"), f"is missing; apt install {package}")


@pytest.mark.matrix
def test_modules_without_kernel_headers_are_skipped(machine: Machine) -> None:
    """The rest of the lab does not need them."""
    names = ("test_fpga_driver", "test_gpu_driver", "test_gpu_service")
    files = [f"{LAB}/{name}.py" for name in names]
    run = machine.pytest(*files, "--setup-only")
    check_all_skipped(run, "the headers of the kernel 6.1.0-1-amd64")
    assert all("linux-headers-6.1.0-1-amd64" in reason for reason in run.reasons)


def test_guest_without_a_kernel_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest, "MODULES", tmp_path)
    with pytest.raises(RuntimeError, match="linux-image-amd64"):
        guest.command_line(tmp_path, [], "1G")


@pytest.mark.matrix
@pytest.mark.parametrize(
    "script",
    [None, pytest.param("echo 'stdio.h: No such file or directory' >&2; exit 1", marks=LONG)],
    ids=["cc", "headers"],
)
def test_driver_in_c_without_compiler_or_headers_is_skipped(
    script: str | None, machine: Machine
) -> None:
    if script:
        machine.add("cc", script)
    files = (
        f"{FUNCTIONAL}/test_external_drivers.py",
        f"{UNIT}/drivers/test_conformance_external.py",
    )
    run = machine.pytest(*files, "-m", "requires", "--setup-plan")
    check_all_skipped(run, "apt install gcc libc6-dev")


@pytest.mark.long
def test_installed_tree_without_git_is_skipped(machine: Machine) -> None:
    run = machine.pytest(f"{FUNCTIONAL}/test_install.py")
    check_all_skipped(run, "git is missing; apt install git")


@pytest.mark.matrix
def test_installed_tree_without_a_clone_is_skipped(machine: Machine) -> None:
    """Git also rejects a clone of another user."""
    machine.add("git", "echo 'fatal: detected dubious ownership' >&2; exit 128")
    run = machine.pytest(f"{FUNCTIONAL}/test_install.py")
    check_all_skipped(run, "no git clone: fatal: detected dubious ownership")


@pytest.mark.matrix
def test_packages_without_any_pip_are_skipped(machine: Machine) -> None:
    (machine.folder / "pip.py").write_text("raise ModuleNotFoundError('No module named pip')\n")
    run = machine.pytest(f"{FUNCTIONAL}/test_driver_package.py", "-k", "found_by_the_agent")
    check_all_skipped(run, "no pip can install into")


@pytest.mark.matrix
def test_packages_in_an_environment_without_pip_are_installed(machine: Machine) -> None:
    """The pip of the base interpreter is used; the tests are skipped if it has none."""
    folder = machine.folder / "venv"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site_packages = Path(sys.prefix) / "lib" / version / "site-packages"
    for entry in site_packages.iterdir():
        if entry.name != "pip" and not entry.name.startswith("pip-"):
            (folder / "lib" / version / "site-packages" / entry.name).symlink_to(entry)
    assert machine.call(python, "-m", "pip", "--version").returncode != 0
    run = machine.pytest(
        f"{FUNCTIONAL}/test_driver_package.py", "-k", "found_by_the_agent", python=python
    )
    assert (run.code, run.others + len(run.reasons)) == (0, 1), run.output
    assert all("no pip can install into" in reason for reason in run.reasons)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("variable", "tests"),
    [
        ("CYBORG_TEST_MYSQL", TESTED_DB),
        pytest.param("CYBORG_TEST_POSTGRESQL", TESTED_DB, marks=LONG),
        ("CYBORG_TEST_RABBIT", f"{FUNCTIONAL}/test_bus_tls.py"),
    ],
)
def test_service_that_does_not_answer_skips_its_tests(
    variable: str, tests: str, machine: Machine
) -> None:
    run = machine.pytest(tests, "--setup-only", **{variable: NO_SERVICES[variable]})
    assert run.code == 0, run.output
    assert [text for text in run.reasons if UNREACHABLE[variable] in text], run.output


@pytest.mark.matrix
def test_broker_that_refuses_the_login_skips_its_tests(rabbit_url: str, machine: Machine) -> None:
    url = rabbit_url.replace("guest:guest@", "guest:wrong@")
    if url == rabbit_url:
        pytest.skip("the broker has no user guest whose password is known")
    run = machine.pytest(f"{FUNCTIONAL}/test_bus_tls.py", "--setup-only", CYBORG_TEST_RABBIT=url)
    assert run.code == 0, run.output
    assert [text for text in run.reasons if "ACCESS_REFUSED" in text], run.output


def lacking_all(folder: Path) -> Machine:
    """Return a machine without any prerequisite, service and pip included."""
    machine = Machine(folder, without="kernel")
    for path in machine.bin.iterdir():
        path.unlink()
    (folder / "pip.py").write_text("raise ModuleNotFoundError('No module named pip')\n")
    with (folder / "elsewhere.py").open("a") as plugin:
        plugin.write(NO_PACKAGES)
    machine.env |= NO_SERVICES
    return machine


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("folders", "count", "services"),
    [
        ((FUNCTIONAL, LAB), 100, tuple(UNREACHABLE)),
        pytest.param(
            *((f"{UNIT}/drivers", f"{UNIT}/rpc"), 20, ("CYBORG_TEST_RABBIT",)), marks=LONG
        ),
    ],
    ids=["functional", "unit"],
)
def test_without_any_prerequisite_all_that_need_one_are_skipped(
    folders: tuple[str, ...], count: int, services: tuple[str, ...], tmp_path: Path
) -> None:
    run = lacking_all(tmp_path).pytest(
        *folders, *("-m", "services or lab or requires", "--setup-only")
    )
    # Some tests of these files need no prerequisite.
    assert (run.code, run.others < 10) == (0, True), run.output
    assert len(run.reasons) > count
    remedies = ("; apt install ", "; pip install ", prerequisites.ALL_PACKAGES)
    assert [r for r in run.reasons if not any(remedy in r for remedy in remedies)] == []
    for service in services:
        assert [reason for reason in run.reasons if UNREACHABLE[service] in reason], service


def test_start_of_a_run_names_everything_that_is_missing(tmp_path: Path) -> None:
    module = (sys.executable, "-m", "cyborg.tests.fixtures.machine.prerequisites")
    machine = lacking_all(tmp_path)
    # The real kernel may be there: this process has no plugin.
    lines = machine.call(*module, "lint", "unit", "functional", "lab", "docs").stdout.splitlines()
    # This environment may have a uWSGI of its own.
    expected = {
        name: prerequisite.skipped for name, prerequisite in prerequisites.PREREQUISITES.items()
    }
    if shutil.which("uwsgi", path=str(Path(sys.executable).parent)):
        del expected["uwsgi"]
    # libvirt, its binding and the packages of other projects are found without PATH.
    packages = ("glance", "keystone", "nova", "tempest")
    for name in ("libvirt", "libvirt_qemu", "libvirt_python", *packages):
        if prerequisites.find_missing(name) is None:
            del expected[name]
    assert [line.split(" will be skipped: ")[0] for line in lines] == list(expected.values())
    assert "the lab will be skipped: qemu-system-x86_64, " in lines[-1]
    remedies = ("; apt install ", "; pip install ", "--prepare once")
    assert all(any(remedy in line for remedy in remedies) for line in lines)


@pytest.mark.matrix
def test_missing_prerequisites_are_failures_if_they_are_enforced(tmp_path: Path) -> None:
    module = (sys.executable, "-m", "cyborg.tests.fixtures.machine.prerequisites")
    machine = lacking_all(tmp_path)
    assert machine.call(*module, "docs").stdout.count("\n") == 1
    enforced = machine.call(*module, "lint", "lab", **{prerequisites.REQUIRE: "1"}).stdout
    assert "the lab will fail: " in enforced
    for name, status in (("shellcheck", 2), ("clone", 1)):
        assert machine.call(*module, "--check", name).returncode == 1
        strict = machine.call(*module, "--check", name, **{prerequisites.REQUIRE: "1"})
        assert strict.returncode == status
