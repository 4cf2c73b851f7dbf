# SPDX-License-Identifier: Apache-2.0
"""Attachments: accelerators that a server gets after its creation. No test needs a server."""

from uuid import uuid4

from tempest.lib import decorators, exceptions

from cyborg.tempest_plugin.api.base import BaseAcceleratorTest


class AttachmentsTest(BaseAcceleratorTest):
    """The list, and the requests that are refused."""

    @decorators.idempotent_id("9c2d8f3b-4f4e-4b07-9f16-5c2f7b0d3e61")
    def test_server_without_attachments_has_an_empty_list(self) -> None:
        found = self.reader.call("GET", "attachments", instance=str(uuid4()))
        self.assertEqual([], found["attachments"])

    @decorators.attr(type=["negative"])
    @decorators.idempotent_id("e13f6b5a-8d0c-4a77-b0bd-2a9b6f4c1d72")
    def test_attachment_needs_one_selector_of_its_device(self) -> None:
        instance = str(uuid4())
        for selectors in ({}, {"device_profile": "p", "device_context": instance}):
            body = {"instance_uuid": instance, **selectors}
            self.assertRaises(exceptions.BadRequest, self.admin.call, "POST", "attachments", body)

    @decorators.attr(type=["negative"])
    @decorators.idempotent_id("40b7e5d1-6a2f-4c93-8e0a-7f3d9b1c5a28")
    def test_member_attaches_nothing(self) -> None:
        body = {"instance_uuid": str(uuid4()), "device_profile": self.create_profile()}
        self.assertRaises(exceptions.Forbidden, self.member.call, "POST", "attachments", body)

    @decorators.attr(type=["negative"])
    @decorators.idempotent_id("7a6c0e92-3b5d-4f18-a4c7-1e8d2f9b6035")
    def test_unknown_attachment_is_not_found(self) -> None:
        for method, path in (
            ("GET", f"attachments/{uuid4()}"),
            ("DELETE", f"attachments/{uuid4()}"),
            ("DELETE", f"attachments?instance={uuid4()}"),
        ):
            self.assertRaises(exceptions.NotFound, self.admin.call, method, path)
