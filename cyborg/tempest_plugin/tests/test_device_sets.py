# SPDX-License-Identifier: Apache-2.0
"""Device sets: devices of one host that are allocated together."""

from tempest.lib import decorators, exceptions

from cyborg.tempest_plugin.tests.base import BaseAcceleratorTest


class DeviceSetsTest(BaseAcceleratorTest):
    """The deployables that are device sets; a cloud may have none."""

    @decorators.idempotent_id("b5d4c7a1-0f6e-4e39-9a8b-3c1d7e2f5b46")
    def test_offers_are_those_of_the_device_sets(self) -> None:
        found = self.admin.call("GET", "deployables")["deployables"]
        sets = [row for row in found if row["device_set"] is not None]
        for row in sets:
            self.assertEqual(row["device_set"]["size"], len(row["device_set"]["members"]))
        for offer in ("offered", "allocated", "withheld"):
            filtered = self.admin.call("GET", "deployables", offer=offer)["deployables"]
            expected = {row["uuid"] for row in sets if row["device_set"]["offer"] == offer}
            self.assertEqual(expected, {row["uuid"] for row in filtered})

    @decorators.idempotent_id("d82a6f0e-5c3b-4d71-8b94-9e0f1a7c6d53")
    def test_sets_of_a_device_have_it_as_a_member(self) -> None:
        for device in self.admin.call("GET", "devices", limit=5)["devices"]:
            found = self.admin.call("GET", "deployables", member=device["uuid"])["deployables"]
            for row in found:
                members = row["device_set"]["members"]
                self.assertIn(device["uuid"], {member["device_uuid"] for member in members})

    @decorators.attr(type=["negative"])
    @decorators.idempotent_id("61f9c3b8-7e4d-4a02-9d15-0b8c2e6f7a39")
    def test_unknown_offer_is_refused(self) -> None:
        self.assertRaises(
            exceptions.BadRequest, self.admin.call, "GET", "deployables?offer=unknown"
        )
