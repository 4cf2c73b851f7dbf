# SPDX-License-Identifier: Apache-2.0
"""Pages of every collection, at the root of a port and below a prefix, over HTTP."""

import itertools
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import requests

from cyborg.db.backends import read as backends
from cyborg.db.binding import accelerators
from cyborg.db.binding import read as arqs
from cyborg.db.deployables import attributes
from cyborg.db.deployables import read as deployables
from cyborg.db.devices import hardware
from cyborg.db.devices import read as devices
from cyborg.db.drivers import read as summaries
from cyborg.db.outbox import read as outbox
from cyborg.db.profiles import read as device_profiles
from cyborg.db.services import read as hosts
from cyborg.db.services import read as services
from cyborg.tests.fixtures.clouds.served_api import Site, roots, site
from cyborg.tests.fixtures.machine import tiers

__all__ = ["roots", "site"]

SOMETHING = "a0000000-0000-4000-8000-00000000ffff"
MOVING = {"last_seen_at"}  # during the test
# Path with a query for all rows, key of the rows, sort keys.
COLLECTIONS = [
    ("accelerator_requests", "arqs", arqs.SORTABLE),
    ("accelerators?state=free", "accelerators", accelerators.SORTABLE),
    ("attributes", "attributes", attributes.SORTABLE),
    ("deployables", "deployables", deployables.SORTABLE),
    ("device_profiles", "device_profiles", device_profiles.SORTABLE),
    ("devices?type=FPGA", "devices", devices.SORTABLE),
    ("drivers", "drivers", summaries.SORTABLE),
    ("hosts", "hosts", hosts.HOST_SORTABLE),
    ("hardware?host=compute-1", "hardware", hardware.SORTABLE),
    ("outbox", "outbox", outbox.SORTABLE),
    ("services", "services", services.SORTABLE),
    ("services?kind=backend", "services", backends.SORTABLE),
]
# In the default tier: without a query, with one, and with one that selects another table.
PAGED = {"accelerator_requests", "devices?type=FPGA", "services?kind=backend"}


def pages(site: Site, path: str, key: str) -> list[list[str]]:
    """Return the uuids of each page, following the links."""
    items, url = [], f"/v2/{path}"
    while url:
        body = site.get(url)
        assert next(iter(body)) == key
        items.append([row["uuid"] for row in body[key]])
        links = body.get(f"{key}_links", [])
        assert [link["rel"] for link in links] in ([], ["next"])
        url = links[0]["href"] if links else ""
        if url:
            query = parse_qs(urlsplit(path).query)
            assert parse_qs(urlsplit(url).query).items() >= query.items()
    return items


@pytest.mark.parametrize(
    "site", tiers.sample(["root", "mount"], "root", mark=pytest.mark.long), indirect=True
)
@pytest.mark.parametrize(
    ("path", "key", "sortable"),
    [
        pytest.param(*case, id=case[0], marks=() if case[0] in PAGED else pytest.mark.matrix)
        for case in COLLECTIONS
    ],
)
def test_each_collection_is_paged(site: Site, path: str, key: str, sortable: Any) -> None:
    mark = "&" if "?" in path else "?"
    rows = site.get(f"/v2/{path}")[key]
    every = [row["uuid"] for row in rows]
    assert len(every) == len(set(every))
    assert site.get(f"/v2/{path}{mark}limit=1&with_count=true")["count"] == len(every)
    assert every or path == "outbox" or path.startswith(("services", "hosts"))
    assert pages(site, f"{path}{mark}limit=1", key) == ([[uuid] for uuid in every] or [[]])
    assert pages(site, f"{path}{mark}limit={len(every) or 1}", key) == [every]
    for name in {*sortable} - MOVING:
        up = pages(site, f"{path}{mark}limit=2&sort_key={name}", key)
        down = pages(site, f"{path}{mark}limit=2&sort_key={name}&sort_dir=desc", key)
        ordered = list(itertools.chain(*up))
        assert sorted(ordered) == sorted(every), name
        assert list(itertools.chain(*down)) == ordered[::-1], name
        values = {row["uuid"]: row.get(name) for row in rows}
        present = [values[uuid] for uuid in ordered if values[uuid] is not None]
        assert present == sorted(present), name


INVALID = [
    *((f"limit={value}", "limit") for value in ("0", "-1", "", "x", "1e3", "%C2%B2", "1" * 99)),
    *((f"marker={value}", "marker") for value in ("", "x", SOMETHING, "%00")),
    *((f"sort_key={value}", "sort_key") for value in ("", "id", "uuid,uuid", "%00")),
    *((f"sort_dir={value}", "sort_dir") for value in ("", "up", "ASC")),
    ("limit=1&limit=2", "limit"),
    ("offset=1", "offset"),
]
REQUESTS = [(path, *invalid) for path, _, _ in COLLECTIONS for invalid in INVALID]
# Each request on one collection, and one request for each field on each collection.
ONE_OF_FIELD = {field: query for query, field in reversed(INVALID)}.items()


@pytest.mark.parametrize(
    ("path", "query", "field"),
    tiers.sample(
        REQUESTS,
        *(
            (path, query, field)
            for path, query, field in REQUESTS
            if path == COLLECTIONS[0][0] or (field, query) in ONE_OF_FIELD
        ),
    ),
)
def test_invalid_page_request_is_rejected(
    roots: Mapping[str, str], path: str, query: str, field: str
) -> None:
    mark = "&" if "?" in path else "?"
    headers = {"OpenStack-API-Version": "accelerator latest"}
    answer = requests.get(f"{roots['root']}/v2/{path}{mark}{query}", headers=headers, timeout=60)
    assert answer.status_code == 400
    assert field in json.loads(answer.json()["error_message"])["faultstring"]
