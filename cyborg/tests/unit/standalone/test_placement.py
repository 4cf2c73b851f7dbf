# SPDX-License-Identifier: Apache-2.0
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cyborg.standalone import placement

pytest.importorskip("placement", reason="the extra 'standalone' is not installed")


@pytest.fixture
def app(tmp_path: Path) -> Iterator[placement.EmbeddedPlacement]:
    made = placement.make_app(f"sqlite:///{tmp_path}/placement.db")
    yield made
    made.close()


def client(app: placement.EmbeddedPlacement) -> Any:
    return placement.make_adapter(app, raise_exc=False)


def names(asked: Any) -> list[str]:
    found = asked.get("/resource_providers").json()["resource_providers"]
    return sorted(p["name"] for p in found)


def test_it_is_the_real_one(app: placement.EmbeddedPlacement) -> None:
    asked, provider = client(app), str(uuid.uuid4())
    assert asked.get("/").json()["versions"][0]["max_version"] >= "1.39"
    made = asked.post("/resource_providers", json={"uuid": provider, "name": "compute-1"})
    assert made.status_code == 200
    body = {"resource_provider_generation": 0, "inventories": {"FPGA": {"total": 2}}}
    path = f"/resource_providers/{provider}/inventories"
    assert asked.put(path, json=body).status_code == 200
    assert asked.put(path, json=body).status_code == 409
    offered = asked.get("/allocation_candidates?resources=FPGA:1").json()
    assert [*offered["allocation_requests"][0]["allocations"]] == [provider]


def test_what_it_knows_survives_a_restart(app: placement.EmbeddedPlacement, tmp_path: Path) -> None:
    assert client(app).post("/resource_providers", json={"name": "a"}).status_code == 200
    app.close()
    again = placement.make_app(f"sqlite:///{tmp_path}/placement.db")
    assert names(client(again)) == ["a"]
    again.close()


def test_a_new_one_closes_the_one_before(app: placement.EmbeddedPlacement, tmp_path: Path) -> None:
    assert client(app).post("/resource_providers", json={"name": "a"}).status_code == 200
    other = placement.make_app(f"sqlite:///{tmp_path}/other.db")
    assert client(app).get("/").status_code == 503
    assert names(client(other)) == []
    other.close()
    other.close()


def test_threads_take_turns(app: placement.EmbeddedPlacement) -> None:
    asked = client(app)
    codes: list[int] = []

    def work(number: int) -> None:
        for step in range(5):
            made = asked.post("/resource_providers", json={"name": f"{number}-{step}"})
            codes.append(made.status_code)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [200] * 40
    assert len(names(asked)) == 40


def test_who_does_not_get_a_turn_is_told(tmp_path: Path) -> None:
    app = placement.EmbeddedPlacement(f"sqlite:///{tmp_path}/placement.db", patience=0.01)
    with app._one_at_a_time:
        assert client(app).get("/").status_code == 503
    app.close()
