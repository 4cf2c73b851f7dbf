# SPDX-License-Identifier: Apache-2.0
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cyborg.standalone import placement

pytestmark = pytest.mark.slow

pytest.importorskip("placement", reason="the extra 'standalone' is not installed")


@pytest.fixture
def app(tmp_path: Path) -> Iterator[placement.EmbeddedPlacement]:
    placement_app = placement.make_app(f"sqlite:///{tmp_path}/placement.db")
    yield placement_app
    placement_app.close()


def make_client(app: placement.EmbeddedPlacement) -> Any:
    return placement.make_adapter(app, raise_exc=False)


def provider_names(client: Any) -> list[str]:
    providers = client.get("/resource_providers").json()["resource_providers"]
    return sorted(provider["name"] for provider in providers)


def test_app_has_the_placement_api(app: placement.EmbeddedPlacement) -> None:
    client, provider = make_client(app), str(uuid.uuid4())
    assert client.get("/").json()["versions"][0]["max_version"] >= "1.39"
    response = client.post("/resource_providers", json={"uuid": provider, "name": "compute-1"})
    assert response.status_code == 200
    body = {"resource_provider_generation": 0, "inventories": {"FPGA": {"total": 2}}}
    path = f"/resource_providers/{provider}/inventories"
    assert client.put(path, json=body).status_code == 200
    assert client.put(path, json=body).status_code == 409
    candidates = client.get("/allocation_candidates?resources=FPGA:1").json()
    assert [*candidates["allocation_requests"][0]["allocations"]] == [provider]


def test_app_keeps_data_after_restart(app: placement.EmbeddedPlacement, tmp_path: Path) -> None:
    assert make_client(app).post("/resource_providers", json={"name": "a"}).status_code == 200
    app.close()
    restarted = placement.make_app(f"sqlite:///{tmp_path}/placement.db")
    assert provider_names(make_client(restarted)) == ["a"]
    restarted.close()


def test_new_app_closes_previous_app(app: placement.EmbeddedPlacement, tmp_path: Path) -> None:
    assert make_client(app).post("/resource_providers", json={"name": "a"}).status_code == 200
    other = placement.make_app(f"sqlite:///{tmp_path}/other.db")
    assert make_client(app).get("/").status_code == 503
    assert provider_names(make_client(other)) == []
    other.close()
    other.close()


def test_app_serves_concurrent_requests_one_by_one(app: placement.EmbeddedPlacement) -> None:
    client = make_client(app)
    codes: list[int] = []

    def work(number: int) -> None:
        for step in range(5):
            response = client.post("/resource_providers", json={"name": f"{number}-{step}"})
            codes.append(response.status_code)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [200] * 40
    assert len(provider_names(client)) == 40


def test_app_busy_past_queue_timeout_is_503(tmp_path: Path) -> None:
    app = placement.EmbeddedPlacement(f"sqlite:///{tmp_path}/placement.db", queue_timeout=0.01)
    with app._request_lock:
        assert make_client(app).get("/").status_code == 503
    app.close()
