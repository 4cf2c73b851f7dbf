# SPDX-License-Identifier: Apache-2.0
"""Microversions: what each adds is absent before it."""

from collections.abc import Sequence

from tempest import config
from tempest.lib import decorators, exceptions
from tempest.lib.common.api_version_request import APIVersionRequest

from cyborg.tempest_plugin.api.base import BaseAcceleratorTest
from cyborg.tempest_plugin.client import SERVICE_TYPE, AcceleratorClient

VERSIONS = ("2.0", "2.1", "2.2", "2.3", "2.4", "2.5", "2.6")
# Collections, and fields of a device, by the microversion that added them.
COLLECTIONS = {
    "2.4": ("accelerators", "drivers", "hardware", "jobs", "services"),
    "2.6": ("attachments", "device_contexts", "hosts", "limits"),
}
DEVICE_FIELDS = {"2.3": "status", "2.4": "health", "2.5": "deliverable", "2.6": "use"}


def versions() -> Sequence[str]:
    """Return the microversions that the options permit."""
    options = config.CONF.cyborg_extensions
    first = APIVersionRequest(options.min_microversion)
    last = APIVersionRequest(options.max_microversion)
    return [name for name in VERSIONS if APIVersionRequest(name).matches(first, last)]


class MicroversionsTest(BaseAcceleratorTest):
    """Requests of an administrator at each microversion."""

    min_microversion = "2.0"

    def client_at(self, version: str) -> AcceleratorClient:
        return AcceleratorClient(self.os_project_admin.auth_provider, version)

    @decorators.idempotent_id("2c7e9d5f-1a4b-4c68-b3f0-8d6a0e9c7b15")
    def test_answer_names_its_microversion(self) -> None:
        for version in versions():
            found = self.client_at(version).call("GET", "devices", limit=1)
            self.assertEqual(f"{SERVICE_TYPE} {version}", found.response["openstack-api-version"])

    @decorators.idempotent_id("a90b3e6c-4d8f-4e27-95b1-6f2c8d0a7e84")
    def test_device_has_the_fields_of_its_microversion(self) -> None:
        if not self.admin.call("GET", "devices", limit=1)["devices"]:
            raise self.skipException("the cloud has no device")
        for version in versions():
            (device,) = self.client_at(version).call("GET", "devices", limit=1)["devices"]
            expected = {
                field
                for since, field in DEVICE_FIELDS.items()
                if VERSIONS.index(since) <= VERSIONS.index(version)
            }
            self.assertEqual(expected, set(DEVICE_FIELDS.values()) & set(device), version)

    @decorators.attr(type=["negative"])
    @decorators.idempotent_id("f4d1a7b2-8c5e-4f90-a6d3-0e7b9c2f1d68")
    def test_collection_is_absent_before_its_microversion(self) -> None:
        for version in versions():
            client = self.client_at(version)
            for since, names in COLLECTIONS.items():
                for name in names:
                    if VERSIONS.index(since) <= VERSIONS.index(version):
                        client.call("GET", name)
                    else:
                        self.assertRaises(exceptions.NotFound, client.call, "GET", name)

    @decorators.attr(type=["negative"])
    @decorators.idempotent_id("05c8f2d9-6b3a-4e71-8f4d-7a1e0b9d2c36")
    def test_unknown_microversion_is_refused(self) -> None:
        client = self.client_at("2.999")
        self.assertRaises(exceptions.NotAcceptable, client.call, "GET", "devices")
