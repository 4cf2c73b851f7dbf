# SPDX-License-Identifier: Apache-2.0
"""An unmodified openstacksdk finds the API at the root of a port and below a prefix."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import openstack
import pytest
import sqlalchemy as sa

from cyborg.standalone.http import HttpServer
from cyborg.tests.fixtures.clouds.api import ApiEnv
from cyborg.tests.fixtures.databases import rows
from cyborg.tests.fixtures.machine.options import make_conf

# Deprecated functions that the SDK itself still calls.
pytestmark = pytest.mark.filterwarnings("ignore::openstack.warnings.RemovedInSDK50Warning")


def mounted(app: Callable[..., Any], mount: str) -> Callable[..., Any]:
    """Return the app below a path, as a web server would serve it."""

    def serve(environ: dict[str, Any], start_response: Any) -> Any:
        path = environ["PATH_INFO"]
        if not path.startswith(mount):
            start_response("404 Not Found", [("Content-Length", "0")])
            return [b""]
        environ |= {"SCRIPT_NAME": mount, "PATH_INFO": path.removeprefix(mount)}
        return app(environ, start_response)

    return serve


@contextmanager
def serve_app(app: Callable[..., Any]) -> Iterator[str]:
    server = HttpServer("127.0.0.1", 0, "port")
    try:
        server.start(app)
        yield server.url
    finally:
        server.stop()


@pytest.mark.parametrize("tail", ["", "/", "/v2"])
@pytest.mark.parametrize("mount", ["", "/accelerator"])
def test_openstacksdk(sqlite_engine: sa.Engine, mount: str, tail: str) -> None:
    conf = make_conf()
    conf.set_override("auth_strategy", "noauth")
    env = ApiEnv(conf, sqlite_engine)
    card = rows.insert_card(sqlite_engine)
    with serve_app(mounted(env.app, mount)) as url:
        cloud = openstack.connect(
            load_yaml_config=False,
            load_envvars=False,
            auth_type="none",
            endpoint=f"{url}{mount}{tail}",
        )
        sdk = cloud.accelerator
        endpoint = sdk.get_endpoint_data()
        assert endpoint is not None
        assert endpoint.max_microversion == (2, 6)
        (device,) = sdk.devices()
        assert device.hostname == "compute-1"
        groups = [{"resources:FPGA": "1"}]
        profile = sdk.create_device_profile(name="sdk", groups=groups)
        assert sdk.get_device_profile("sdk").uuid == profile.uuid
        arq = sdk.create_accelerator_request(device_profile_name="sdk")
        values = {
            "hostname": "compute-1",
            "device_rp_uuid": card.provider,
            "instance_uuid": str(uuid4()),
        }
        patch = [{"op": "add", "path": f"/{key}", "value": item} for key, item in values.items()]
        sdk.update_accelerator_request(arq.id, patch)
        assert sdk.get_accelerator_request(arq.id).state == "Bound"
        with pytest.raises(openstack.exceptions.ConflictException, match="in use"):
            sdk.delete_device_profile(profile, ignore_missing=False)
        sdk.delete_accelerator_request(arq.id, ignore_missing=False)
        sdk.delete_device_profile(profile, ignore_missing=False)
        # The client follows the links of several pages.
        for name in ("a", "b", "c"):
            rows.insert_profile(sqlite_engine, name)
        assert [sdk_profile.name for sdk_profile in sdk.device_profiles(limit=1)] == ["a", "b", "c"]
        cloud.close()
