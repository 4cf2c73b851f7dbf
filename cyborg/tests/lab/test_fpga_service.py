# SPDX-License-Identifier: Apache-2.0
"""An FPGA of a real kernel, from the REST API and a real Glance to its region and back."""

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from cyborg.db import schema
from cyborg.tests.fixtures.clouds.glance import RealGlance, run_glance
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.machine import guest, kernel_module
from cyborg.tests.lab.cloud import Lab, running_lab
from cyborg.tests.lab.programs import FPGA_FUNCTIONS, FPGA_INTERFACE, FPGA_OTHER_INTERFACE

pytestmark = [
    pytest.mark.lab,
    pytest.mark.services,
    pytest.mark.long,
    pytest.mark.requires("kernel_headers"),
]

FPGA = "FPGA"
REGION = f"CUSTOM_FPGA_REGION_{FPGA_INTERFACE.upper()}"
EMPTY = "11" * 16  # the function after a boot
# The kernel searches firmware from the root of the boot, which is not that of the agent.
FIRMWARE = "ln -s / /new; echo -n /new/lib/firmware >/sys/module/firmware_class/parameters/path"


@pytest.fixture(scope="module")
def glance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealGlance]:
    with run_glance(tmp_path_factory.mktemp("glance")) as service:
        yield service


@pytest.fixture(scope="module")
def lab(
    tmp_path_factory: pytest.TempPathFactory, rabbit_url: str, glance: RealGlance
) -> Iterator[Lab]:
    modules = kernel_module.build(kernel_module.EDUFPGA)
    setup = "; ".join(
        [FIRMWARE, "modprobe vfio-pci", "set -e", *(f"insmod {module}" for module in modules)]
    )
    options: Mapping[str, Mapping[str, Any]] = {
        "agent": {"enabled_drivers": "", "enabled_backends": "cards", "discovery_interval": 5},
        "cards": {"driver": "fpga", "devices": ["vendor=1234,product=11e8,type=FPGA"]},
        "glance": {
            "auth_type": "none",
            "endpoint_override": guest.as_seen_inside(glance.url),
        },
    }
    folder = tmp_path_factory.mktemp("fpga")
    devices = [*guest.IOMMU, *guest.EDU, *guest.EMPTY_PORTS]
    with running_lab(folder, rabbit_url, devices, options, setup, FPGA) as new_lab:
        yield new_lab


def add_image(glance: RealGlance, function: str, mode: str = "first", **properties: str) -> str:
    """Upload an image for the lab's card; ``mode`` is how the manager of the card reacts."""
    data = bytes.fromhex(function) + mode.encode().ljust(16, b"\0") + bytes(100_000)
    own = {"accel:region_id": FPGA_INTERFACE, "accel:function_id": function}
    return glance.add_image(data, **own | properties)


def loaded(lab: Lab) -> str:
    """Return the function that the kernel's region has."""
    return lab.guest.run("cat /sys/class/fpga_region/region0/function").split()[0]


def bind_image(lab: Lab, provider: str, image: str, expected: str) -> str:
    """Bind and release an ARQ with an image; return the error of its job, or an empty string."""
    name = f"image-{uuid.uuid4()}"
    groups = [{"resources:FPGA": "1", "accel:bitstream_id": image}]
    lab.call("POST", "/v2/device_profiles", json=[{"name": name, "groups": groups}])
    # A card whose health was measured while its previous image was restored is closed for a moment.
    lab.until("it is offered", lambda: lab.offered(FPGA) == [provider])
    _, instance = lab.bind(provider, name, expected)
    records = rows.read(lab.engine, schema.jobs)
    (error,) = [row["error"] for row in records if row["subject"] == instance]
    lab.release(instance)
    lab.until("the handle is clean", lambda: not dirty(lab))
    return str(error or "")


def dirty(lab: Lab) -> bool:
    return any(row["needs_cleaning"] for row in rows.read(lab.engine, schema.attach_handles))


def program(lab: Lab, image: str) -> None:
    """Load an image as an operator does, and wait until the card reports it."""
    (deployable,) = lab.call("GET", "/v2/deployables")["deployables"]
    path = f"/v2/deployables/{deployable['uuid']}"
    patch = [{"path": "/program", "op": "replace", "value": [{"image_uuid": image}]}]
    lab.call("PATCH", f"{path}/program", json=patch)
    lab.until("it is programmed", lambda: lab.call("GET", path)["bitstream_id"] == image)


def traits(lab: Lab, provider: str) -> set[str]:
    answer = lab.cloud.placement.get(f"/resource_providers/{provider}/traits")
    return set(answer.json()["traits"])


def trait_of(function: str) -> str:
    return f"CUSTOM_FPGA_FUNCTION_{function.upper()}"


def test_hot_plugged_card_is_offered_with_its_region_until_it_is_unplugged(lab: Lab) -> None:
    (first,) = lab.offered(FPGA)
    lab.plug("rp1", "edu")
    lab.until("both are offered", lambda: len(lab.offered(FPGA)) == 2)
    (second,) = set(lab.offered(FPGA)) - {first}
    lab.until("its region is known", lambda: REGION in traits(lab, second))
    lab.unplug("rp1")
    lab.until("one is offered", lambda: lab.offered(FPGA) == [first])
    assert len(lab.call("GET", "/v2/deployables")["deployables"]) == 1


def test_images_of_glance_are_loaded_and_failures_keep_the_function(
    lab: Lab, glance: RealGlance
) -> None:
    """One test: the guest boots once, and each step begins with the function of the last one."""
    (provider,) = lab.offered(FPGA)
    assert loaded(lab) == EMPTY
    first, second = FPGA_FUNCTIONS["first"], FPGA_FUNCTIONS["second"]
    program(lab, add_image(glance, first))
    assert loaded(lab) == first
    lab.until("Placement has its trait", lambda: trait_of(first) in traits(lab, provider))

    other = add_image(glance, second, **{"accel:region_id": FPGA_OTHER_INTERFACE})
    assert "accel:region_id" in bind_image(lab, provider, other, "BindFailed")
    assert loaded(lab) == first

    damaged = add_image(glance, second)
    stored = glance.stored_file(damaged)
    stored.write_bytes(b"\xff" + stored.read_bytes()[1:])
    assert "digest" in bind_image(lab, provider, damaged, "BindFailed")
    assert loaded(lab) == first

    failing = add_image(glance, second, "fail")
    error = bind_image(lab, provider, failing, "BindFailed")
    assert "Input/output error" in error
    assert "was restored" in error
    assert loaded(lab) == first

    assert bind_image(lab, provider, add_image(glance, second), "Bound") == ""
    assert loaded(lab) == second
    # The server had the whole card, so it could have loaded another function.
    functions = {trait_of(first), trait_of(second)}
    lab.until("its function is unknown", lambda: not functions & traits(lab, provider))
