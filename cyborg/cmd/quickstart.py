# SPDX-License-Identifier: Apache-2.0
"""cyborg-quickstart: the accelerators of this machine, from discovery to release, and device sets.

It starts the stand-alone service in a temporary folder, and needs no configuration.
"""

import argparse
import contextlib
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.parse
import uuid
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import requests

from cyborg.cli import app

PROFILE = "quickstart"
RECORDING = resources.files("cyborg.testing") / "captures/hosts/hgx-h100.jsonl"
CONFIG = """\
[agent]
enabled_backends = pci, fake

[pci]
driver = generic
# All PCI devices; bridges and devices that this machine itself uses are never offered.
devices = address=*

[fake]
driver = fake
# An address that no real card can have.
address = fffe:00:00.0

[conductor]
hello_interval = 1
"""
# A replay touches no device of this machine.
SETS_CONFIG = f"""\
[DEFAULT]
host = hgx-1

[agent]
replay = {RECORDING}
enabled_backends = gpus
device_sets = hgx

[gpus]
driver = gpu
devices = vendor=10de,class=0302
reset = if_possible

[hgx]
kind = fabric
members = gpus
wanted = 4:1, 2:2

[conductor]
hello_interval = 1
"""
SETS_GROUP = {"resources:PGPU": "2", "trait:CUSTOM_SET_FABRIC": "required"}
# Commands without output, which do not know the option -f.
NO_OUTPUT = ("arq-unbind", "arq-delete", "device-profile-delete")
PCI = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
STARTED = time.monotonic()


class Failed(Exception):
    """The demonstration cannot continue."""


def say(text: str = "") -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@contextlib.contextmanager
def section(title: str) -> Iterator[None]:
    """Print the title of a part, and its duration at the end."""
    begin = time.monotonic()
    say(f"\n== {title}")
    yield
    say(f"   ({time.monotonic() - begin:.1f} s)")


class Service:
    """The stand-alone service in a separate process with a temporary folder."""

    def __init__(self, text: str = CONFIG) -> None:
        """Start the service with this configuration."""
        self.folder = Path(tempfile.mkdtemp(prefix="cyborg-quickstart-"))
        self.log = self.folder / "standalone.log"
        self.api = self.placement = ""
        config = self.folder / "cyborg.conf"
        config.write_text(text)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(  # noqa: S603  (this interpreter, no shell)
                [
                    # -P: the current folder may have a checkout, which is not what is installed.
                    *(sys.executable, "-P", "-m", "cyborg.cmd.standalone"),
                    *("--config-file", config, "--state-dir", self.folder / "state", "--port", "0"),
                    *("--placement-port", "0"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C must not reach the service; it is stopped after the cleanup.
                start_new_session=True,
            )

    def wait(self, seconds: float = 60, show: bool = True) -> None:
        """Wait until the service is ready, and set its addresses. Raise Failed.

        By default its messages are printed until then.
        """
        end = time.monotonic() + seconds
        shown = 0
        while True:
            lines = self.log.read_text(errors="replace").splitlines()
            for line in lines[shown:]:
                if show and line.startswith("cyborg-standalone: "):
                    say("   " + line.removeprefix("cyborg-standalone: "))
            shown = len(lines)
            text = "\n".join(lines)
            if "cyborg-standalone: ready" in text:
                self.api = re.findall(r"API listens on (\S+)", text)[0]
                self.placement = re.findall(r"Placement listens on (\S+)", text)[0]
                return
            if self.process.poll() is not None:
                raise Failed(f"the service ended with {self.process.returncode}:\n{text[-3000:]}")
            if time.monotonic() > end:
                raise Failed(f"the service was not ready after {seconds:g} s:\n{text[-3000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop the service and remove its files."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


WIDTH = 77  # a terminal of 80 columns less the margin


def run_client(service: Service, *arguments: str, read: bool = True, show: bool = False) -> Any:
    """Run the command line client; return its JSON output, or print its table.

    It runs in this process: ten starts of an interpreter would take half of the total time.
    """
    if show:
        say(f"   $ cyborg {' '.join(arguments)}")
    output_options: tuple[str, ...] = ("-f", "json") if read else ("--max-width", str(WIDTH))
    if arguments[0] in NO_OUTPUT:
        output_options = ()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = app.main(
            ["--os-auth-type", "none", "--os-endpoint", service.api, *arguments, *output_options],
        )
    # The client has caught a Ctrl-C, which must end this command, too.
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code:
        raise Failed(f"cyborg {' '.join(arguments)}: {err.getvalue().strip()}")
    if read:
        return json.loads(out.getvalue())
    for line in out.getvalue().splitlines():
        say(f"   {line}")
    return None


def placement(service: Service, method: str, path: str, body: Any = None) -> Any:
    """Send a request to Placement and return its JSON."""
    with requests.Session() as session:
        session.trust_env = False  # a proxy cannot reach the loopback interface
        answer = session.request(
            method,
            service.placement + path,
            json=body,
            headers={"X-Auth-Token": "admin", "OpenStack-API-Version": "placement 1.39"},
            timeout=30,
        )
    if not answer.ok:
        raise Failed(f"Placement: {method} {path}: {answer.status_code} {answer.text}")
    return answer.json() if answer.content else None


def show_table(headings: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    """Print rows in columns."""
    lines = [tuple(str(cell) for cell in line) for line in (headings, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headings))]
    for line in lines:
        say("   " + "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip())


def providers(service: Service) -> list[dict[str, Any]]:
    """Return the providers below the compute node, with inventories, usages and traits."""
    found = placement(service, "GET", "/resource_providers")["resource_providers"]
    devices = [p for p in found if p["parent_provider_uuid"]]
    for provider in devices:
        base = f"/resource_providers/{provider['uuid']}"
        for part in ("inventories", "usages", "traits"):
            provider[part] = placement(service, "GET", f"{base}/{part}")[part]
    return devices


def published(service: Service, devices: int) -> list[dict[str, Any]]:
    """Wait until every device has an inventory in Placement."""
    end = time.monotonic() + 30
    while True:
        found = providers(service)
        ready = sum(bool(provider["inventories"]) for provider in found)
        if ready >= devices:
            return found
        if time.monotonic() > end:
            raise Failed(f"{ready} of {devices} devices are in Placement after 30 s")
        time.sleep(0.1)


def show_withheld(service: Service, devices: list[dict[str, Any]]) -> int:
    """Print why devices are not schedulable; return the number that is not offered at all."""
    hardware = run_client(service, "hardware-list", "--long")
    # Specs have the number of handles. A device with handles has an inventory in Placement.
    withheld = [row for row in hardware if row["Not offered"] and not row["Specs"]["num"]]
    for row in withheld:
        say(f"   {row['Address']} is not offered: {row['Not offered']}")
    withheld_addresses = {row["Address"] for row in withheld}
    addresses_by_reason: dict[str, list[str]] = {}
    for device in devices:
        reason = device["Undeliverable reason"]
        if reason and device["Address"] not in withheld_addresses:
            addresses_by_reason.setdefault(reason, []).append(device["Address"])
    for reason, addresses in addresses_by_reason.items():
        for line in textwrap.wrap(f"{', '.join(addresses)}: {reason}", WIDTH):
            say(f"   {line}")
    return len(withheld)


def is_schedulable(provider: dict[str, Any]) -> bool:
    """Return whether a provider has a unit that Placement can allocate.

    Cyborg reserves the whole inventory of a device that cannot be attached to an instance.
    """
    return any(i["total"] > i["reserved"] for i in provider["inventories"].values())


def groups(found: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return request groups: two FPGAs of the fake card, and a schedulable real device, if any."""
    profile_groups = [{"resources:FPGA": "2", "trait:CUSTOM_FAKE_DEVICE": "required"}]
    real = [p for p in found if not is_fake(p) and is_schedulable(p)]
    if real:
        # The only class: a provider has that of its deployable.
        resource = next(iter(real[0]["inventories"]))
        traits = sorted(t for t in real[0]["traits"] if t.startswith("CUSTOM_"))
        profile_groups.append(
            {f"resources:{resource}": "1"} | {f"trait:{t}": "required" for t in traits}
        )
    return profile_groups


def candidates(service: Service, profile_groups: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Return allocation candidates, with one numbered request group per group, as Nova does."""
    query = [("group_policy", "none")]
    for number, group in enumerate(profile_groups):
        suffix = f"_device_profile_{number}"
        resources = [
            f"{key.removeprefix('resources:')}:{amount}"
            for key, amount in group.items()
            if key.startswith("resources:")
        ]
        query.append((f"resources{suffix}", ",".join(resources)))
        if traits := [key.removeprefix("trait:") for key in group if key.startswith("trait:")]:
            query.append((f"required{suffix}", ",".join(traits)))
    path = f"/allocation_candidates?{urllib.parse.urlencode(query)}"
    found: list[dict[str, Any]] = placement(service, "GET", path)["allocation_requests"]
    return found


def run_demo(service: Service) -> str:
    """Run the demonstration and return a summary in one sentence."""
    with section("Starting API, conductor, agent and Placement in one process"):
        service.wait()
    with section("Discovering the devices of this machine"):
        run_client(service, "discover-services", "--wait", read=False, show=True)
        run_client(service, "device-list", read=False, show=True)
        devices = run_client(service, "device-list", "--long")
        found = published(service, len(devices) - show_withheld(service, devices))
        real = [p for p in found if PCI.search(p["name"]) and not is_fake(p) and is_schedulable(p)]
        if not real:
            say("   No PCI device of this machine is schedulable: continuing with the fake card.")
    with section("Creating a device profile"):
        profile_groups = groups(found)
        create_profile(service, profile_groups)
    with section("Requesting allocation candidates from Placement"):
        choices = candidates(service, profile_groups)
        say(f"   allocation candidates: {len(choices)}")
        if not choices:
            raise Failed("Placement offers nothing for the profile")
        choice = choices[0]
        names = {p["uuid"]: p["name"] for p in found}
        for group, (provider,) in sorted(choice["mappings"].items()):
            say(f"   {group.lstrip('_')} -> {names[provider]}")
    instance = str(uuid.uuid4())
    with section(f"Binding accelerators to instance {instance}"):
        say("   no server is built: the instance is a random uuid with an allocation in Placement")
        arqs = bind(service, choice, instance, devices[0]["Host"])
    with section("Inventories and usages in Placement"):
        show_table(
            ("PROVIDER", "CLASS", "TOTAL", "RESERVED", "USED"),
            [
                (
                    p["name"],
                    name,
                    inventory["total"],
                    inventory["reserved"],
                    p["usages"].get(name, 0),
                )
                for p in providers(service)
                for name, inventory in p["inventories"].items()
            ],
        )
    with section("Releasing everything"):
        release(service, instance, arqs)
        left = run_client(service, "arq-list")
        used = sum(sum(p["usages"].values()) for p in providers(service))
        if left or used:
            raise Failed(f"{len(left)} requests and {used} units in use remain")
        say("   no request left, nothing in use")
    return summary(len(devices), [p["name"] for p in real], bound=len(arqs))


def create_profile(service: Service, profile_groups: list[dict[str, str]]) -> None:
    """Create the device profile with these groups."""
    arguments = [
        w
        for group in profile_groups
        for w in ("--group", ",".join(f"{k}={v}" for k, v in group.items()))
    ]
    run_client(service, "device-profile-create", PROFILE, *arguments, read=False, show=True)


def bind(service: Service, choice: dict[str, Any], instance: str, host: str) -> list[str]:
    """Allocate a candidate, and bind the profile's requests as Nova does; return their uuids."""
    placement(
        service,
        "PUT",
        f"/allocations/{instance}",
        {
            "allocations": choice["allocations"],
            "mappings": choice["mappings"],
            "project_id": str(uuid.uuid4()),
            "user_id": str(uuid.uuid4()),
            "consumer_generation": None,
            "consumer_type": "INSTANCE",
        },
    )
    arqs = [arq["UUID"] for arq in run_client(service, "arq-create", PROFILE, show=True)]
    numbers = {arq["UUID"]: arq["Group"] for arq in run_client(service, "arq-list", "--long")}
    arguments = ["arq-bind", *arqs, "--host", host, "--instance", instance]
    for arq in arqs:
        (provider,) = choice["mappings"][f"_device_profile_{numbers[arq]}"]
        arguments += ["--provider", provider]
    run_client(service, *arguments, read=False, show=True)
    end = time.monotonic() + 30
    while True:
        states = {arq["State"] for arq in run_client(service, "arq-list", "--instance", instance)}
        if states == {"Bound"}:
            return arqs
        # The agent may have to prepare the devices first.
        if states - {"Bound", "BindStarted"} or time.monotonic() > end:
            raise Failed(f"expected every request to be Bound, found {sorted(states)}")
        time.sleep(0.1)


def release(service: Service, instance: str, arqs: list[str]) -> None:
    """Unbind and delete requests, and delete the allocation and the device profile."""
    run_client(service, "arq-unbind", *arqs, read=False, show=True)
    run_client(service, "arq-delete", *arqs, read=False, show=True)
    placement(service, "DELETE", f"/allocations/{instance}")
    run_client(service, "device-profile-delete", PROFILE, read=False, show=True)


def run_sets(service: Service) -> str:
    """Bind a device set of a simulated host; return a summary in a part of a sentence."""
    with section("Device sets: replaying a simulated host with eight H100 on an HGX baseboard"):
        service.wait(show=False)
        # The source of the sets groups the GPUs when their driver has discovered them.
        end = time.monotonic() + 60
        while not any(map(is_pair, providers(service))):
            if time.monotonic() > end:
                raise Failed("Placement offers no device set of two after 60 s")
            time.sleep(0.1)
        run_client(service, "device-set-list", "--offer", "offered", read=False, show=True)
    instance = str(uuid.uuid4())
    with section(f"Binding two GPUs with NVLink to instance {instance}"):
        create_profile(service, [SETS_GROUP])
        choices = candidates(service, [SETS_GROUP])
        if not choices:
            raise Failed("Placement offers no set for the profile")
        arqs = bind(service, choices[0], instance, host="hgx-1")
        offers = ("--offer", "allocated", "--offer", "offered")
        run_client(service, "device-set-list", *offers, read=False, show=True)
        allocated = run_client(service, "device-set-list", "--offer", "allocated")
        if [(row["Size"], row["Owner"]) for row in allocated] != [(2, instance)]:
            raise Failed(f"expected a set of two GPUs of {instance}, found {allocated}")
        release(service, instance, arqs)
    return f"a set of {len(arqs)} simulated GPUs"


def is_pair(provider: dict[str, Any]) -> bool:
    """Return whether a provider is a device set of two that Placement can allocate."""
    return is_schedulable(provider) and any(
        inventory["total"] == 2 and "CUSTOM_SET_FABRIC" in provider["traits"]
        for inventory in provider["inventories"].values()
    )


def summary(devices: int, real: list[str], bound: int) -> str:
    """Return a summary in one sentence; ``real`` are the providers of the PCI bus."""
    schedulable = "no schedulable PCI device"
    if real:
        schedulable = f"{len(real)} schedulable PCI devices, such as {real[0]}"
    return (
        f"{devices} devices discovered ({schedulable}; and a fake card), {bound} accelerators "
        "bound to an instance and released"
    )


def is_fake(provider: dict[str, Any]) -> bool:
    """Return whether a provider belongs to the fake card."""
    return "CUSTOM_FAKE_DEVICE" in provider["traits"]


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="cyborg-quickstart", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the service running")
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    service, sets = Service(), None
    kept = False
    try:
        result = run_demo(service)
        sets = Service(SETS_CONFIG)
        result += f"; {run_sets(sets)} too"
        kept = args.keep
    except Failed as exc:
        sys.stderr.write(f"\nquickstart: FAILED: {exc}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\nquickstart: interrupted, cleaning up\n")
        return 130
    finally:
        # A second Ctrl-C must not interrupt the cleanup.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if not kept:
            service.stop()
        if sets is not None:
            sets.stop()
    if kept:
        say("\nThe service is still running. To use the service:")
        say(f"   export OS_AUTH_TYPE=none OS_ENDPOINT={service.api}")
        say(f"   {Path(sys.executable).with_name('cyborg')} device-list")
        say(f"   open {service.api}/ui/ in a browser: the web console")
        say(f"   curl -s -H 'X-Auth-Token: admin' {service.placement}/resource_providers")
        say("To stop the service and remove its files:")
        say(f"   kill {service.process.pid} && sleep 2 && rm -r {service.folder}")
    say(f"\nquickstart: OK: {result} ({time.monotonic() - STARTED:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
