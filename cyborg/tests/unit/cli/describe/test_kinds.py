# SPDX-License-Identifier: Apache-2.0
import pytest

from cyborg.api.operation import Collection
from cyborg.api.v2 import (
    accelerators,
    arqs,
    attachments,
    deployables,
    device_contexts,
    device_profiles,
    devices,
    drivers,
    hardware,
    jobs,
    services,
)
from cyborg.cli.describe.kinds import KINDS
from cyborg.cli.hardware import HARDWARE

# Links, and the fields of deployables whose parts are columns.
PARTS = {"links", "placement", "device_set"}
APIS = (
    *(accelerators.ACCELERATORS, arqs.ARQS, attachments.ATTACHMENTS, deployables.ATTRIBUTES),
    *(deployables.DEPLOYABLES, device_contexts.CONTEXTS, device_profiles.DEVICE_PROFILES),
    *(devices.DEVICES, drivers.DRIVERS, hardware.HARDWARE, jobs.JOBS, jobs.OUTBOX),
    services.SERVICES,
)


@pytest.mark.parametrize("api", APIS, ids=lambda api: str(api.name))
def test_json_of_a_list_has_all_fields_of_the_service(api: Collection) -> None:
    collections = [*(kind.collection for kind in KINDS), HARDWARE]
    collection = next(each for each in collections if each.path == f"/{api.name}")
    fields = {attribute.name for attribute in api.datatype._wsme_attributes}
    assert len(fields) > 3
    assert fields - {key for _, key in collection.long} <= PARTS
