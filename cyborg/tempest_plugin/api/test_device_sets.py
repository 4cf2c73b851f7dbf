# SPDX-License-Identifier: Apache-2.0
"""Device sets: devices of one host that are allocated together."""

from typing import Any

from tempest.lib import decorators, exceptions

from cyborg.tempest_plugin.api.base import BaseAcceleratorTest

OFFERS = ("offered", "allocated", "withdrawing", "withheld")


class DeviceSetsTest(BaseAcceleratorTest):
    """The deployables that are device sets."""

    def find_sets(self) -> list[Any]:
        """Return device sets of each offer; skip the test if there are none."""
        found = []
        for offer in OFFERS:
            rows = self.admin.call("GET", "deployables", offer=offer, limit=50)["deployables"]
            self.assertEqual([offer] * len(rows), [row["device_set"]["offer"] for row in rows])
            found += rows
        if not found:
            raise self.skipException("the cloud has no device sets")
        return found

    @decorators.idempotent_id("b5d4c7a1-0f6e-4e39-9a8b-3c1d7e2f5b46")
    def test_list_and_show_have_the_same_members(self) -> None:
        for row in self.find_sets():
            device_set = row["device_set"]
            self.assertEqual(device_set["size"], len(device_set["members"]))
            found = self.admin.call("GET", f"deployables/{row['uuid']}")
            self.assertEqual(device_set["members"], found["device_set"]["members"])

    @decorators.idempotent_id("d82a6f0e-5c3b-4d71-8b94-9e0f1a7c6d53")
    def test_sets_of_a_member_are_found_by_it(self) -> None:
        pairs = [
            (row["uuid"], member["device_uuid"])
            for row in self.find_sets()
            for member in row["device_set"]["members"]
            if member["device_uuid"] is not None
        ]
        if not pairs:
            raise self.skipException("no member of a device set is on its host")
        for uuid, device in pairs[:10]:
            found = self.admin.call("GET", "deployables", member=device)["deployables"]
            self.assertIn(uuid, {row["uuid"] for row in found})
            for row in found:
                members = row["device_set"]["members"]
                self.assertIn(device, {member["device_uuid"] for member in members})

    @decorators.attr(type=["negative"])
    @decorators.idempotent_id("61f9c3b8-7e4d-4a02-9d15-0b8c2e6f7a39")
    def test_unknown_offer_is_refused(self) -> None:
        self.assertRaises(
            exceptions.BadRequest, self.admin.call, "GET", "deployables", offer="unknown"
        )
