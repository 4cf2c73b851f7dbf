# SPDX-License-Identifier: Apache-2.0
"""CADF events of requests: who did what to which object, with which outcome, without secrets."""

import json
from pathlib import Path
from typing import Any

import pytest
import webob
from oslo_config import cfg
from pycadf import cadftaxonomy

import cyborg
from cyborg.api.app import make_app
from cyborg.api.controller import ApiContext
from cyborg.api.middleware import MAX_LENGTH, ROOT, AuditLayer
from cyborg.api.routes import build_routes
from cyborg.core.errors import Misconfigured
from cyborg.rpc.notifications import GROUP, is_enabled
from cyborg.tests.fixtures.clouds.api import ApiEnv
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.machine.processes import wait_until

MAP_FILE = Path(cyborg.__file__).parents[1] / "etc" / "cyborg" / "api_audit_map.conf"
UUID = "02c950a2-e263-4eeb-bf72-b1d2b6e2065c"
TOKEN = "gAAAAA-token-of-a-user-with-some-length-0123456789"


class Events:
    """Notifier that keeps the events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def notify(self, context: Any, event_type: str, payload: Any) -> None:
        """Keep an event."""
        self.events.append((event_type, json.loads(json.dumps(payload))))


def audit_conf(**api: Any) -> cfg.ConfigOpts:
    return make_conf(api={"audit_map_file": str(MAP_FILE), **api})


def request(method: str, path: str, status: int = 200, **environ: Any) -> list[Any]:
    """Send a request with the headers of keystone; return its events."""
    notifier = Events()
    seen: list[dict[str, Any]] = []

    def app(environ: dict[str, Any], start_response: Any) -> Any:
        seen.append(environ)
        return webob.Response(status=status)(environ, start_response)

    layer = AuditLayer(app, audit_conf(audit_ignored_methods=[]), notifier)
    sent = webob.Request.blank(path, method=method)
    sent.environ |= {
        ROOT: "http://accelerator.example",
        "HTTP_X_AUTH_TOKEN": TOKEN,
        "HTTP_X_SERVICE_TOKEN": TOKEN,
        "HTTP_X_USER_ID": "user-1",
        "HTTP_X_USER_NAME": "alice",
        "HTTP_X_PROJECT_ID": "project-1",
        "HTTP_X_FORWARDED_FOR": "6.6.6.6",
        "REMOTE_ADDR": "192.0.2.7",
        "openstack.request_id": "req-1",
        **environ,
    }
    assert sent.get_response(layer).status_int == status
    assert seen[0] is sent.environ, "the API sees the original request"
    assert TOKEN[:5] not in json.dumps(notifier.events)
    return notifier.events


def test_request_has_an_event_before_and_one_with_its_outcome() -> None:
    (before_type, before), (after_type, after) = request("DELETE", f"/v2/devices/{UUID}", 204)
    assert (before_type, after_type) == ("audit.http.request", "audit.http.response")
    assert before["outcome"] == "pending"
    assert (after["outcome"], after["reason"]["reasonCode"]) == ("success", "204")
    assert after["id"] == before["id"]
    assert after["action"] == "delete"
    assert after["target"]["typeURI"] == "service/accelerator/devices/device"
    assert after["target"]["name"] == "cyborg"
    assert after["requestPath"] == f"/v2/devices/{UUID}"
    initiator = after["initiator"]
    assert (initiator["id"], initiator["name"]) == ("user-1", "alice")
    assert (initiator["project_id"], initiator["request_id"]) == ("project-1", "req-1")
    assert initiator["host"]["address"] == "192.0.2.7", "not what the client claims"


def test_rejected_request_is_a_failure() -> None:
    _, (_, after) = request("POST", "/v2/device_profiles", 409)
    assert (after["outcome"], after["reason"]["reasonCode"]) == ("failure", "409")


def test_texts_of_the_client_are_bounded() -> None:
    _, (_, event) = request("POST", "/v2/devices?x=" + "y" * 5000, HTTP_USER_AGENT="z" * 5000)
    assert len(event["requestPath"]) < 2 * MAX_LENGTH
    assert len(event["initiator"]["host"]["agent"]) == MAX_LENGTH


def routes() -> list[tuple[str, str]]:
    unused: Any = None
    table = build_routes(ApiContext(make_conf(), unused, unused))
    return [(method, path) for path, methods in table.items() for method in methods]


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["/v2", "", "/accelerator/v2"])
def test_map_has_a_target_and_an_action_for_each_route(prefix: str) -> None:
    for method, path in routes():
        words = [UUID if word == "*" else word for word in path.split("/")]
        (_, event), _ = request(method, f"{prefix}/{'/'.join(words)}")
        target = event["target"]["typeURI"]
        collection, *others = words
        assert target.startswith(f"service/accelerator/{collection}"), (method, path, target)
        # The type of the object follows the collection: devices/device.
        assert target.count("/") == 2 + bool(others) + _named(others), (method, path, target)
        assert event["action"] != cadftaxonomy.UNKNOWN
        assert cadftaxonomy.is_valid_action(event["action"]), event["action"]
        assert event["action"].startswith("read") == (method == "GET"), (method, path)


def _named(words: list[str]) -> int:
    """Return how many parts follow the object: an operation such as ``enable`` is none."""
    operations = {"enable", "disable", "bind", "unbind", "pre_bind", "retry"}
    return sum(word not in operations for word in words[1:])


def test_operations_of_a_device_are_different_actions() -> None:
    def action(method: str, path: str) -> str:
        return str(request(method, f"/v2/{path}")[0][1]["action"])

    assert action("POST", f"devices/{UUID}/enable") == "enable"
    assert action("POST", f"devices/{UUID}/disable") == "disable"
    assert action("PUT", f"devices/{UUID}/maintenance") == "update/begin_maintenance"
    assert action("DELETE", f"devices/{UUID}/maintenance") == "update/end_maintenance"
    assert action("POST", f"device_contexts/{UUID}/bind") == "update/bind"
    assert action("PATCH", f"deployables/{UUID}/program") == "update/program"
    assert action("POST", "device_profiles") == "create"
    assert action("GET", "device_profiles") == "read/list"
    assert action("GET", "summary") == "read"


@pytest.mark.parametrize("ignored", [["GET", "HEAD"], ["get"], []])
def test_ignored_methods_have_no_event(ignored: list[str]) -> None:
    notifier = Events()
    app = webob.Response()
    layer = AuditLayer(app, audit_conf(audit_ignored_methods=ignored), notifier)
    environ: Any = {ROOT: "http://accelerator.example"}
    webob.Request.blank("/v2/devices", environ=environ).get_response(layer)
    assert len(notifier.events) == (0 if ignored else 2)


def test_audit_is_disabled_by_default(api: ApiEnv) -> None:
    assert api.conf.api.audit_map_file is None
    assert api.conf.api.audit_ignored_methods == ["GET", "HEAD"]


@pytest.mark.parametrize("text", [None, "[path_keywords]\nno value\n", "no section"])
def test_unusable_map_file_is_an_error_that_names_it(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "map.conf"
    if text is not None:
        path.write_text(text)
    with pytest.raises(Misconfigured, match="audit_map_file") as caught:
        AuditLayer(webob.Response(), audit_conf(audit_map_file=str(path)), Events())
    assert str(path) in caught.value.message


def test_audit_without_a_notification_driver_is_an_error(api: ApiEnv) -> None:
    unused: Any = None
    api.conf.set_override("audit_map_file", str(MAP_FILE), group="api")
    with pytest.raises(Misconfigured, match=r"\[oslo_messaging_notifications\] driver"):
        make_app(api.conf, unused, unused)


def test_api_sends_events_with_the_log_driver(
    api: ApiEnv, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    api.conf.set_override("audit_map_file", str(MAP_FILE), group="api")
    is_enabled(api.conf)
    api.conf.set_override("driver", ["log"], group=GROUP)
    api.conf.set_override("transport_url", "kombu+memory:////", group=GROUP)
    audited = ApiEnv(api.conf, api.engine)
    profile = audited.create_profile("audited")
    assert audited.call("DELETE", f"/v2/device_profiles/{profile['uuid']}").status_int == 204
    assert audited.call("DELETE", f"/v2/device_profiles/{UUID}").status_int == 404

    def events() -> list[Any]:
        found = [record.getMessage() for record in caplog.records if "audit.http" in record.name]
        return [json.loads(text)["payload"] for text in found]

    wait_until("the events are sent", lambda: len(events()) >= 6)
    shown = [
        (event["action"], event["outcome"], event["target"]["typeURI"].rpartition("/")[2])
        for event in events()
        if event["outcome"] != "pending"
    ]
    assert shown == [
        ("create", "success", "device_profiles"),
        ("delete", "success", "device_profile"),
        ("delete", "failure", "device_profile"),
    ]
    assert {event["initiator"]["id"] for event in events()} == {"noauth"}
