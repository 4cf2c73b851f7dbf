# SPDX-License-Identifier: Apache-2.0
"""The server side of the web console: files, sign-in and session."""

import io
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa

from cyborg.api.console import sign_in, throttle
from cyborg.api.console import site as files
from cyborg.testing.fake_keystone import FakeKeystone
from cyborg.tests.fixtures.clouds.api import ApiEnv, error_message
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.tests.fixtures.machine.processes import free_port
from cyborg.tests.functional.console.service import keystone_conf

PASSWORD = "a pass word"
CREDENTIALS = {"user": "ann", "password": PASSWORD, "project": "project-1"}


@pytest.fixture
def console(sqlite_engine: sa.Engine) -> ApiEnv:
    """Return an API with the console and without authentication."""
    conf = make_conf(api={"console": True})
    conf.set_override("auth_strategy", "noauth")
    return ApiEnv(conf, sqlite_engine)


@pytest.fixture
def keystone_console(sqlite_engine: sa.Engine, fake_keystone: FakeKeystone) -> ApiEnv:
    """Return an API with the console and with a double of keystone that knows a user."""
    fake_keystone.add_user("ann", PASSWORD, ["reader"], "project-1")
    return ApiEnv(keystone_conf(fake_keystone), sqlite_engine)


@pytest.fixture
def app_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Yield everything that is logged, at any level."""
    with caplog.at_level(logging.DEBUG):
        yield caplog


@pytest.mark.parametrize("path", ["/ui", "/ui/", "/ui/app.js", "/ui/session", "/ui/sign-in"])
def test_console_by_default_does_not_exist(api: ApiEnv, path: str) -> None:
    assert api.call("GET", path).status_int == 404


@pytest.mark.parametrize("name", files.TYPES)
def test_file_is_served_with_the_security_headers(console: ApiEnv, name: str) -> None:
    answer = console.call("GET", f"/ui/{name}")
    assert answer.status_int == 200
    assert answer.headers["Content-Type"] == files.TYPES[name]
    assert answer.body == (files.FOLDER / name).read_bytes()
    assert dict(files.SECURITY_HEADERS).items() <= dict(answer.headers).items()
    assert "unsafe" not in answer.headers["Content-Security-Policy"]
    head = console.call("HEAD", f"/ui/{name}")
    assert (head.status_int, head.body) == (200, b"")
    same = console.call("GET", f"/ui/{name}", headers={"If-None-Match": answer.headers["ETag"]})
    assert (same.status_int, same.body) == (304, b"")


@pytest.mark.static
def test_page_has_neither_inline_code_nor_addresses_of_other_sites() -> None:
    page = (files.FOLDER / "index.html").read_text()
    assert "//" not in page
    for forbidden in ("<style", "style=", "<script>", " on", "javascript:"):
        assert forbidden not in page.replace("<noscript>", "").partition("<noscript>")[0]


@pytest.mark.parametrize(
    "path", ["/ui/none", "/ui/../app.py", "/ui/%2e%2e/app.py", "/ui//etc/passwd", "/ui/app.js/"]
)
def test_unknown_path_below_ui_is_404(console: ApiEnv, path: str) -> None:
    assert console.call("GET", path).status_int == 404


def test_page_without_slash_redirects_below_the_prefix(console: ApiEnv) -> None:
    answer = console.call("GET", "/ui", SCRIPT_NAME="/accelerator")
    # Browsers would keep a permanent redirect for ever.
    assert answer.status_int == 307
    assert answer.headers["Location"] == "http://localhost/accelerator/ui/"
    public = "https://cloud.example.org/acc/v2"
    console.conf.set_override("public_endpoint", public, group="api")
    assert console.call("GET", "/ui").headers["Location"] == "https://cloud.example.org/acc/ui/"


@pytest.mark.parametrize("path", ["/ui", "/ui/app.js", "/ui/session"])
def test_other_methods_are_405(console: ApiEnv, path: str) -> None:
    answer = console.call("POST", path, {})
    assert (answer.status_int, answer.headers["Allow"]) == (405, "GET, HEAD")


def test_console_without_authentication_rejects_pages_of_other_sites(console: ApiEnv) -> None:
    assert console.call("GET", "/ui/", headers={"Host": "evil.example.org"}).status_int == 403


def test_session_without_authentication_has_every_rule(console: ApiEnv) -> None:
    session = console.call("GET", "/ui/session")
    assert session.headers["Cache-Control"] == "no-store"
    assert (session.json["auth"], session.json["all_projects"]) == ("noauth", True)
    assert "cyborg:driver:uninstall" in session.json["rules"]


def test_session_with_keystone_has_the_rules_of_the_role(
    keystone_console: ApiEnv, fake_keystone: FakeKeystone
) -> None:
    assert keystone_console.call("GET", "/ui/session").status_int == 401
    reader = fake_keystone.issue_token(["reader"])
    session = keystone_console.call("GET", "/ui/session", headers={"X-Auth-Token": reader}).json
    assert (session["user"], session["project"]) == ("user", "project-1")
    assert "cyborg:arq:get_all" in session["rules"]
    assert not {"cyborg:arq:create", "cyborg:device:get_all"} & set(session["rules"])
    admin = {"X-Auth-Token": fake_keystone.issue_token(["admin"])}
    rules = keystone_console.call("GET", "/ui/session", headers=admin).json["rules"]
    assert {"cyborg:device:get_all", "cyborg:summary:get"} <= set(rules)


def test_sign_in_returns_a_token_of_keystone(keystone_console: ApiEnv) -> None:
    answer = keystone_console.call("POST", "/ui/sign-in", CREDENTIALS)
    assert answer.status_int == 201
    assert answer.headers["Cache-Control"] == "no-store"
    assert "Set-Cookie" not in answer.headers
    token = {"X-Auth-Token": answer.json["token"]}
    session = keystone_console.call("GET", "/ui/session", headers=token).json
    assert (session["user"], session["roles"]) == ("ann", ["reader"])


def test_sign_in_with_wrong_password_is_401_and_the_password_is_not_logged(
    keystone_console: ApiEnv, app_log: pytest.LogCaptureFixture
) -> None:
    wrong = {**CREDENTIALS, "password": "Xy77secret"}
    answer = keystone_console.call("POST", "/ui/sign-in", wrong)
    assert answer.status_int == 401
    assert "does not accept" in error_message(answer)
    assert keystone_console.call("POST", "/ui/sign-in", CREDENTIALS).status_int == 201
    assert "Xy77secret" not in answer.text + app_log.text
    assert PASSWORD not in app_log.text


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b"{", 400),
        (b"[" * 8000, 400),
        ({"user": "ann", "password": "p"}, 400),
        ({**CREDENTIALS, "user": 7}, 400),
        ({**CREDENTIALS, "auth_url": "http://other.example.org"}, 400),
        ({**CREDENTIALS, "password": "p" * 1025}, 400),
        ({**CREDENTIALS, "password": "p" * 10_000}, 413),
    ],
)
def test_sign_in_with_invalid_body_is_rejected(
    keystone_console: ApiEnv, body: object, status: int
) -> None:
    answer = keystone_console.call("POST", "/ui/sign-in", body)
    assert answer.status_int == status, answer.text


def test_client_that_sends_its_body_slowly_delays_no_other_one(
    keystone_console: ApiEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go_on = threading.Semaphore(0), threading.Event()

    class SlowBody(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            started.release()
            assert go_on.wait(30)
            return super().read(size)

    body = json.dumps(CREDENTIALS).encode()

    def send_slowly() -> None:
        environ = {"wsgi.input": SlowBody(body), "CONTENT_LENGTH": str(len(body))}
        headers = {"Content-Type": "application/json"}
        keystone_console.call("POST", "/ui/sign-in", headers=headers, **environ)

    threads = [threading.Thread(target=send_slowly) for _ in range(throttle.MAX_CALLS)]
    for thread in threads:
        thread.start()
        assert started.acquire(timeout=30)
    assert keystone_console.call("POST", "/ui/sign-in", CREDENTIALS).status_int == 201
    go_on.set()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    ("status", "headers", "expected", "text"),
    [
        (400, {}, 401, "does not accept"),
        (403, {}, 401, "does not accept"),
        (401, {"Openstack-Auth-Receipt": "2030-01-01T00:00:00Z"}, 401, "second factor"),
        (401, {"Openstack-Auth-Receipt": "no time"}, 503, ""),
        (429, {}, 503, ""),
        (500, {}, 503, ""),
        (201, {}, 503, ""),
    ],
)
def test_sign_in_shows_why_keystone_rejects_it(
    keystone_console: ApiEnv,
    fake_keystone: FakeKeystone,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    headers: dict[str, str],
    expected: int,
    text: str,
) -> None:
    expires = headers.get("Openstack-Auth-Receipt")
    receipt: dict[str, Any] = {
        "receipt": {"methods": ["password"], "user": {}, "expires_at": expires}
    }
    document = {**receipt, "required_auth_methods": [["totp"]]} if headers else {"token": {}}
    monkeypatch.setattr(fake_keystone, "sign_in", lambda _: (status, headers, document))
    found = keystone_console.call("POST", "/ui/sign-in", CREDENTIALS)
    assert found.status_int == expected, found.text
    assert text in error_message(found)
    assert fake_keystone.url not in error_message(found)


def test_sign_in_of_a_form_of_another_site_is_rejected(keystone_console: ApiEnv) -> None:
    form = {"Content-Type": "text/plain"}
    answer = keystone_console.call("POST", "/ui/sign-in", CREDENTIALS, form)
    assert answer.status_int == 415


def test_sign_in_while_keystone_is_unreachable_is_503(
    sqlite_engine: sa.Engine, fake_keystone: FakeKeystone
) -> None:
    conf = keystone_conf(fake_keystone)
    url = f"http://127.0.0.1:{free_port()}/v3"
    conf.set_override("www_authenticate_uri", url, group="keystone_authtoken")
    api = ApiEnv(conf, sqlite_engine)
    assert api.call("POST", "/ui/sign-in", CREDENTIALS).status_int == 503


def test_sign_in_without_an_address_of_keystone_is_500(
    sqlite_engine: sa.Engine, fake_keystone: FakeKeystone, app_log: pytest.LogCaptureFixture
) -> None:
    conf = keystone_conf(fake_keystone)
    conf.set_override("www_authenticate_uri", None, group="keystone_authtoken")
    api = ApiEnv(conf, sqlite_engine)
    assert api.call("POST", "/ui/sign-in", CREDENTIALS).status_int == 500
    assert "www_authenticate_uri" in app_log.text


def test_sign_ins_beyond_the_limit_are_429(
    keystone_console: ApiEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go_on = threading.Semaphore(0), threading.Event()

    def wait(*_: object) -> dict[str, str]:
        started.release()
        assert go_on.wait(30)
        return {}

    monkeypatch.setattr(sign_in.SignIn, "_authenticate", wait)
    monkeypatch.setattr(throttle, "QUEUE_TIMEOUT", 0)
    threads = [
        threading.Thread(target=keystone_console.call, args=("POST", "/ui/sign-in", CREDENTIALS))
        for _ in range(throttle.MAX_CALLS)
    ]
    for thread in threads:
        thread.start()
        assert started.acquire(timeout=30)
    answer = keystone_console.call("POST", "/ui/sign-in", CREDENTIALS)
    assert (answer.status_int, answer.headers["Retry-After"]) == (429, "2")
    assert "too many sign-ins" in error_message(answer)
    go_on.set()
    for thread in threads:
        thread.join()
    assert keystone_console.call("POST", "/ui/sign-in", CREDENTIALS).status_int == 201


def test_sign_ins_beside_two_loops_of_wrong_passwords_all_succeed(
    keystone_console: ApiEnv, fake_keystone: FakeKeystone
) -> None:
    stop = threading.Event()
    wrong = {**CREDENTIALS, "user": "bob", "password": "wrong"}
    statuses: list[int] = []

    def try_passwords(address: str) -> None:
        while not stop.is_set():
            answer = keystone_console.call("POST", "/ui/sign-in", wrong, REMOTE_ADDR=address)
            statuses.append(answer.status_int)

    loops = [threading.Thread(target=try_passwords, args=[f"192.0.2.{n}"]) for n in (1, 2)]
    for loop in loops:
        loop.start()
    try:
        found = [
            keystone_console.call(
                "POST", "/ui/sign-in", CREDENTIALS, REMOTE_ADDR=f"198.51.100.{number}"
            ).status_int
            for number in range(20)
        ]
    finally:
        stop.set()
        for loop in loops:
            loop.join()
    assert found == [201] * 20
    assert set(statuses) == {401, 429}
