# SPDX-License-Identifier: Apache-2.0
"""The common behaviour of all routes, at the root of a port and below a prefix, over HTTP."""

import json
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

from cyborg.tests.fixtures.clouds.served_api import Site, roots, site
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.fixtures.machine.tiers import sample

__all__ = ["roots", "site"]

SOMETHING = "a0000000-0000-4000-8000-00000000ffff"
LINKED = ("accelerator_requests", "attributes", "deployables", "device_profiles", "devices")

# The other site only with --all: only the URLs of requests and answers differ.
SITES = ("root", "mount")
at_root = pytest.mark.parametrize("site", sample(SITES, "root"), indirect=True)
below_prefix = pytest.mark.parametrize("site", sample(SITES, "mount"), indirect=True)


def routes(site: Site, method: str) -> list[tuple[str, Any]]:
    """Return the paths of a method with their operations; names are those of missing objects."""
    document = site.get("/v2/openapi.json")
    return [
        ("/".join(SOMETHING if "{" in part else part for part in path.split("/")), methods[method])
        for path, methods in document["paths"].items()
        if method in methods
    ]


@below_prefix
def test_path_accepts_four_forms(site: Site) -> None:
    for path, _ in routes(site, "get"):
        answers = [
            site.request("GET", f"{prefix}{path}{end}")
            for prefix in ("/v2", "")
            for end in ("", "/")
        ]
        assert {answer.status_code for answer in answers} in ({200}, {404}), path
        if answers[0].status_code == 200:
            first = answers[0].json()
            for answer in answers[1:]:
                # A heartbeat may have arrived between the two.
                assert answer.json().keys() == first.keys(), path
    assert site.request("GET", "/v2//devices").status_code == 404
    assert site.request("GET", "/v3/devices").status_code == 404


@below_prefix
def test_head_and_options_are_answered(site: Site) -> None:
    for path, _ in routes(site, "get"):
        get_response, head = site.request("GET", f"/v2{path}"), site.request("HEAD", f"/v2{path}")
        assert head.status_code == get_response.status_code, path
        assert head.content == b"", path
        assert head.headers["Content-Type"] == "application/json"
        options = site.request("OPTIONS", f"/v2{path}")
        assert options.status_code == 405
        assert "GET, HEAD" in options.headers["Allow"]
    for path, _ in routes(site, "patch"):
        allowed = site.request("PUT", f"/v2{path}").headers["Allow"]
        assert "PATCH" in allowed, path


@at_root
@pytest.mark.parametrize(
    ("header", "version"),
    [
        (None, "2.0"),
        ("", "2.0"),
        ("compute 2.90", "2.0"),
        *((f"accelerator 2.{minor}", f"2.{minor}") for minor in range(7)),
        ("accelerator latest", "2.6"),
        ("compute 2.90, accelerator 2.3", "2.3"),
        ("accelerator 2.7", None),
        ("accelerator 1.9", None),
        ("accelerator", None),
        # The forms that OpenStack Cyborg accepts.
        ("2.3", "2.3"),
        ("2.3 ", "2.3"),
        ("latest", "2.6"),
        ("Latest", "2.6"),
        ("Accelerator LATEST", "2.6"),
        ("accelerator  2.3", "2.3"),
        ("compute 2.90 beta, accelerator 2.3", "2.3"),
        ("compute 2.90, 2.3", "2.3"),
        ("2.7", None),
        ("2.3.1", None),
        ("two", None),
        ("accelerator two", None),
        ("accelerator 2.3 beta", None),
        ("compute 2.90 beta", None),
    ],
)
def test_microversions_are_negotiated(site: Site, header: str | None, version: str | None) -> None:
    answer = site.request("GET", "/v2/devices", headers={"OpenStack-API-Version": header})
    assert answer.status_code == (406 if version is None else 200)
    assert answer.headers["OpenStack-API-Version"] == f"accelerator {version or '2.0'}"
    assert answer.headers["OpenStack-API-Minimum-Version"] == "accelerator 2.0"
    assert answer.headers["OpenStack-API-Maximum-Version"] == "accelerator 2.6"
    assert "OpenStack-API-Version" in answer.headers["Vary"]
    if version is not None:
        assert all(("status" in d) == (version >= "2.3") for d in answer.json()["devices"])
        younger = site.request("GET", "/v2/services", headers={"OpenStack-API-Version": header})
        assert younger.status_code == (200 if version >= "2.4" else 404)


def test_self_links_return_their_object(site: Site) -> None:
    for path in LINKED:
        rows = next(iter(site.get(f"/v2/{path}").values()))
        assert len(rows) == 3
        for row in rows:
            for link in row["links"]:
                assert row["uuid"] in site.request("GET", link["href"]).text
    for path in ("/", "/v2", "/v2/"):
        body = site.get(path)
        (link,) = body.get("links") or body["versions"][0]["links"]
        assert link["href"] == f"{site.root}/v2"


def has_image(site: Site, path: str, image: str) -> bool:
    return bool(site.get(path)["bitstream_id"] == image)


@at_root
def test_deployable_program_is_accepted(site: Site) -> None:
    deployable = site.get("/v2/deployables")["deployables"][-1]
    path = f"/v2/deployables/{deployable['uuid']}"
    # The longer form is that of openstacksdk.
    for form in (f"{path}/program", f"{path}/program/{deployable['uuid']}"):
        image = str(uuid4())
        body = [{"path": "/program", "op": "replace", "value": [{"image_uuid": image}]}]
        answer = site.request("PATCH", form, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json().keys() == deployable.keys()
        assert answer.json()["uuid"] == deployable["uuid"]
        wait_until(f"{form} loads it", partial(has_image, site, path, image))


@at_root
def test_query_with_nul_character_gets_400(site: Site) -> None:
    request_count = 0
    for method in ("get", "delete"):
        for path, operation in routes(site, method):
            for parameter in operation["parameters"]:
                if parameter.get("in") == "query":
                    name = parameter["name"]
                    answer = site.request(method.upper(), f"/v2{path}?{name}=a%00b")
                    assert answer.status_code == 400, answer.text
                    assert name in answer.text
                    request_count += 1
    for method in ("get", "post", "patch", "delete"):
        for path, _ in routes(site, method):
            if SOMETHING in path:
                answer = site.request(
                    method.upper(), f"/v2{path.replace(SOMETHING, 'a%00b')}", json={}
                )
                assert answer.status_code in (400, 404), answer.text
                request_count += 1
    assert request_count > 60


@at_root
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "device_profiles", {"name": "n", "groups": [{"accel:x": "v"}]}),
        ("POST", "device_profiles", {"name": "n", "groups": [{"trait:CUSTOM_A": "required"}]}),
        ("POST", "device_profiles", {"name": "n", "description": "d", "groups": []}),
        ("POST", "accelerator_requests", {"device_profile_name": "n"}),
        (
            "PATCH",
            "accelerator_requests",
            {SOMETHING: [{"path": "/hostname", "op": "add", "value": "h"}]},
        ),
        ("POST", "attributes", {"deployable_id": SOMETHING, "key": "k", "value": "v"}),
        ("POST", "attributes", {"attribute": {"deployable_id": SOMETHING, "key": "k"}}),
        (
            "PATCH",
            f"deployables/{SOMETHING}/program",
            [{"path": "/program", "op": "replace", "value": [{"image_uuid": SOMETHING}]}],
        ),
        ("POST", "discoveries", {"host": "h", "driver": "d"}),
    ],
)
def test_body_with_nul_character_gets_400(site: Site, method: str, path: str, body: Any) -> None:
    text = json.dumps(body)
    words = {word for word in text.split('"')[1::2] if word}
    for word in words:
        for character in ("\\u0000", "\\ud800"):
            spoilt = text.replace(f'"{word}"', f'"{word}{character}"')
            answer = site.request(
                method,
                f"/v2/{path}",
                data=spoilt.encode(),
                headers={"Content-Type": "application/json"},
            )
            assert answer.status_code in (400, 404), (spoilt, answer.text)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "nonsense"])
def test_body_requires_json_content_type(site: Site, kind: str) -> None:
    answer = site.request(
        "POST", "/v2/discoveries", data=b'{"host": "h"}', headers={"Content-Type": kind}
    )
    assert answer.status_code == 415


@at_root
@pytest.mark.parametrize(
    ("accept", "status"),
    [
        ("application/json", 200),
        ("application/*;q=0.1, text/html", 200),
        ("*/*", 200),
        ("", 200),
        ("text/html", 406),
        ("application/json;q=0", 406),
    ],
)
def test_response_is_json(
    site: Site, caplog: pytest.LogCaptureFixture, accept: str, status: int
) -> None:
    assert site.request("GET", "/v2/devices", headers={"Accept": accept}).status_code == status
    # A client error is not an error of the service.
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
