# SPDX-License-Identifier: Apache-2.0
"""Device contexts: accelerators that a project requests before it has a server."""

from uuid import uuid4

from tempest.lib import decorators, exceptions

from cyborg.tempest_plugin.api.base import BaseAcceleratorTest


class DeviceContextsTest(BaseAcceleratorTest):
    """A context from its creation to its deletion, without a server."""

    @decorators.idempotent_id("8a5e2d0f-6b1c-4f3f-9a52-0d7c1f6f3b10")
    def test_context_has_the_groups_of_its_resources(self) -> None:
        created = self.create_context(resources={"FPGA": 1}, requires=["CUSTOM_TEMPEST"])
        self.assertEqual("unbound", created["state"])
        self.assertEqual(f"ctx-{created['uuid']}", created["hidden_profile"])
        (group,) = created["groups"]
        self.assertEqual("1", group["resources:FPGA"])
        self.assertEqual("required", group["trait:CUSTOM_TEMPEST"])
        found = self.reader.call("GET", f"device_contexts/{created['uuid']}")
        self.assertEqual(created["groups"], found["groups"])
        self.assertEqual(1, len(found["arqs"]))

    @decorators.idempotent_id("1b8f0a34-53d1-4d11-8f0d-63f4f8c3cf52")
    def test_context_has_the_groups_of_its_device_profile(self) -> None:
        profile = self.create_profile()
        created = self.create_context(device_profile=profile)
        self.assertEqual(profile, created["device_profile"])
        self.assertEqual("1", created["groups"][0]["resources:FPGA"])

    @decorators.idempotent_id("c6f1cf0b-9d0e-4d55-8a3b-2b8f59f1c5e3")
    def test_list_is_filtered_by_name_and_state(self) -> None:
        name = f"tempest-{uuid4()}"
        uuid = self.create_context(name=name, resources={"FPGA": 1})["uuid"]
        for state, expected in (("unbound", [uuid]), ("bound", [])):
            found = self.reader.call("GET", "device_contexts", name=name, state=state)
            self.assertEqual(expected, [row["uuid"] for row in found["device_contexts"]])

    @decorators.idempotent_id("f2a90f6e-7d3c-4a0b-b4c9-9d0f4f0c7b61")
    def test_changed_context_is_shown_and_a_deleted_one_is_not(self) -> None:
        path = f"device_contexts/{self.create_context(resources={'FPGA': 1})['uuid']}"
        self.member.call("PATCH", path, {"name": "other", "config_data": {"key": "value"}})
        found = self.reader.call("GET", path)
        self.assertEqual(("other", {"key": "value"}), (found["name"], found["config_data"]))
        self.member.call("DELETE", path)
        self.assertRaises(exceptions.NotFound, self.reader.call, "GET", path)

    @decorators.idempotent_id("0e9b7b0b-1f35-4a36-8d4c-52f4d5d59f07")
    def test_hidden_profile_replaces_the_requests_as_for_a_server(self) -> None:
        context = self.create_context(resources={"FPGA": 2})
        path = f"device_contexts/{context['uuid']}"
        first = self.reader.call("GET", path)["arqs"]
        body = {"device_profile_name": context["hidden_profile"]}
        created = self.member.call("POST", "accelerator_requests", body)["arqs"]
        found = self.reader.call("GET", path)["arqs"]
        self.assertEqual(2, len(created))
        self.assertEqual({arq["uuid"] for arq in created}, {arq["uuid"] for arq in found})
        self.assertEqual(set(), {arq["uuid"] for arq in first} & {arq["uuid"] for arq in found})

    @decorators.attr(type=["negative"])
    @decorators.idempotent_id("5d6b3f4c-2a3a-4c2e-8f25-7c1e6b1a9d88")
    def test_create_context_with_invalid_selector_is_refused(self) -> None:
        for body in (
            {},
            {"resources": {"FPGA": 1}, "device_profile": "tempest"},
            {"resources": {"FPGA": 0}},
            {"resources": {"VCPU": 1}},
        ):
            self.assertRaises(exceptions.BadRequest, self.create_context, **body)

    @decorators.attr(type=["negative"])
    @decorators.idempotent_id("3f7d3a8e-0d63-4e1f-9d6b-6f0b8e1c2a94")
    def test_reader_creates_no_context(self) -> None:
        self.assertRaises(
            exceptions.Forbidden, self.create_context, self.reader, resources={"FPGA": 1}
        )
