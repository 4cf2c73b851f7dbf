# SPDX-License-Identifier: Apache-2.0
"""The users of the tests, and the objects that a test creates."""

from typing import Any
from uuid import uuid4

from tempest import config, test
from tempest.lib.common import api_version_utils
from tempest.lib.common.utils import test_utils

from cyborg.tempest_plugin.client import AcceleratorClient


class BaseAcceleratorTest(api_version_utils.BaseMicroversionTest, test.BaseTestCase):
    """A test that calls the API as an administrator, and as a member and a reader of a project."""

    credentials = ["project_admin", "project_member", "project_reader"]
    min_microversion = "2.6"

    admin: AcceleratorClient
    member: AcceleratorClient
    reader: AcceleratorClient

    @classmethod
    def setup_credentials(cls) -> None:
        # No networks: no test has a server.
        cls.set_network_resources()
        super().setup_credentials()

    @classmethod
    def skip_checks(cls) -> None:
        super().skip_checks()
        options = config.CONF.cyborg_extensions
        if not options.enabled:
            raise cls.skipException("[cyborg_extensions] enabled is false")
        # Another plugin has this option: registered twice it would be an error.
        if not getattr(config.CONF.service_available, "cyborg", True):
            raise cls.skipException("[service_available] cyborg is false")
        api_version_utils.check_skip_with_microversion(
            cls.min_microversion,
            cls.max_microversion,
            options.min_microversion,
            options.max_microversion,
        )

    @classmethod
    def setup_clients(cls) -> None:
        super().setup_clients()
        version = api_version_utils.select_request_microversion(
            cls.min_microversion, config.CONF.cyborg_extensions.min_microversion
        )
        cls.admin, cls.member, cls.reader = (
            AcceleratorClient(user.auth_provider, version)
            for user in (cls.os_project_admin, cls.os_project_member, cls.os_project_reader)
        )

    def create_profile(self) -> str:
        """Create a device profile of one FPGA; return its name."""
        name = f"tempest-{uuid4()}"
        self.admin.call(
            "POST", "device_profiles", [{"name": name, "groups": [{"resources:FPGA": "1"}]}]
        )
        self._delete_at_end(self.admin, f"device_profiles/{name}")
        return name

    def create_context(self, client: AcceleratorClient | None = None, **body: Any) -> Any:
        """Create a device context of the project as a member or another user; return it."""
        found = (client or self.member).call("POST", "device_contexts", body)
        self._delete_at_end(self.member, f"device_contexts/{found['uuid']}")
        return found

    def _delete_at_end(self, client: AcceleratorClient, path: str) -> None:
        delete = test_utils.call_and_ignore_notfound_exc
        self.addCleanup(delete, client.call, "DELETE", path)
