# SPDX-License-Identifier: Apache-2.0
"""Images in the whole service: REST, job, agent, Glance and the fake driver that fetches them."""

import hashlib
import json
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import pytest
import requests

from cyborg.conductor.jobs.answers import POLL_INTERVALS
from cyborg.core import naming
from cyborg.core.jobs.job import JobKind
from cyborg.standalone.stack import StandaloneStack
from cyborg.testing.fake_glance import FakeGlance, serve_glance
from cyborg.tests.fixtures.clouds.glance import RealGlance, run_glance
from cyborg.tests.fixtures.clouds.standalone import HOST, running
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.fixtures.machine.tiers import sample
from cyborg.tests.functional.test_standalone import daemon, endpoint

CARD = "0000:0c:00.0"
DATA = bytes(range(256)) * 4000
FUNCTION = "D8424DC4A4A3C413F89E433683F9040B"


class ImageServer(Protocol):
    """A Glance of a test."""

    @property
    def url(self) -> str:
        """Return the endpoint."""

    def add_image(self, data: bytes, **properties: Any) -> str:
        """Upload an image and return its uuid."""


class Env:
    """A stack with one card, whose driver fetches images from a Glance."""

    def __init__(self, stack: StandaloneStack, glance: ImageServer, folder: Path) -> None:
        self.stack = stack
        self.glance = glance
        self.spool = folder / "state" / "agent" / f"images-{HOST}"
        self._journal = folder / "journal"

    def call(self, method: str, path: str, body: Any = None) -> Any:
        url = f"{self.stack.endpoint}/v2/{path}"
        headers = {"OpenStack-API-Version": "accelerator latest", "X-Service-Token": "any"}
        answer = requests.request(method, url, json=body, headers=headers, timeout=60)
        assert answer.ok, answer.text
        return answer.json() if answer.content else None

    def program(self, image: str) -> dict[str, Any]:
        """Load an image into the card and return the job when it has ended."""
        known = {job["uuid"] for job in self.call("GET", "jobs")["jobs"]}
        (part,) = self.call("GET", "deployables")["deployables"]
        patch = [{"path": "/program", "op": "replace", "value": [{"image_uuid": image}]}]
        self.call("PATCH", f"deployables/{part['uuid']}/program", patch)

        def ended() -> list[dict[str, Any]]:
            jobs = self.call("GET", "jobs")["jobs"]
            return [j for j in jobs if j["uuid"] not in known and j["state"] != "pending"]

        (job,) = wait_until("the job has ended", ended)
        return dict(self.call("GET", f"jobs/{job['uuid']}"))

    def bind(self, **accel: str) -> tuple[str, str | None]:
        """Bind and delete an ARQ; return its state, and the error of its job."""
        name = f"images-{uuid.uuid4()}"
        keys = {f"accel:{key}": value for key, value in accel.items()}
        self.call(
            "POST", "device_profiles", [{"name": name, "groups": [{"resources:FPGA": "1", **keys}]}]
        )
        (arq,) = self.call("POST", "accelerator_requests", {"device_profile_name": name})["arqs"]
        values = {
            "hostname": HOST,
            "device_rp_uuid": naming.provider_uuid(HOST, CARD),
            "instance_uuid": str(uuid.uuid4()),
        }
        patch = [{"op": "add", "path": f"/{key}", "value": value} for key, value in values.items()]
        self.call("PATCH", "accelerator_requests", {arq["uuid"]: patch})

        def state() -> str | None:
            found = self.call("GET", f"accelerator_requests/{arq['uuid']}")["state"]
            return found if found in ("Bound", "BindFailed") else None

        result = wait_until("the bind has ended", state)
        jobs = self.call("GET", "jobs?kind=prepare")["jobs"]
        (error,) = [j["error"] for j in jobs if j["subject"] == values["instance_uuid"]]
        self.call("DELETE", f"accelerator_requests?arqs={arq['uuid']}")
        return result, error

    def fetched(self) -> list[tuple[str, str]]:
        """Return uuid and digest of each image that the driver got."""
        lines = map(json.loads, self._journal.read_text().splitlines())
        return [(line["image"], line["sha256"]) for line in lines if line["act"] == "fetch"]


@pytest.fixture(scope="module", params=["double", pytest.param("real", marks=pytest.mark.matrix)])
def glance(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ImageServer]:
    if request.param == "double":
        with serve_glance(FakeGlance()) as double:
            yield double
    else:
        with run_glance(tmp_path_factory.mktemp("glance")) as real:
            yield real


@pytest.fixture(scope="module")
def env(glance: ImageServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Env]:
    folder = tmp_path_factory.mktemp("images")
    options = {"prepare": "ok", "fetch_images": True, "journal": folder / "journal"}
    section = {
        "auth_type": "none",
        "endpoint_override": glance.url,
        "max_image_size": 2 * len(DATA),
        "retries": 0,
    }
    with running(folder, handles=2, fake=options, glance=section) as stack:
        yield Env(stack, glance, folder)


def test_image_is_programmed(env: Env) -> None:
    image = env.glance.add_image(DATA, **{"accel:region_type_id": "R"})
    job = env.program(image)
    assert (job["state"], job["error"]) == ("done", None)
    assert env.fetched()[-1] == (image, hashlib.sha256(DATA).hexdigest())
    assert (env.spool / image).read_bytes() == DATA
    (part,) = env.call("GET", "deployables")["deployables"]
    assert part["bitstream_id"] == image


@pytest.mark.parametrize("glance", ["double"], indirect=True)
def test_job_shows_how_much_of_an_image_is_fetched(
    env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(env.glance, FakeGlance)
    monkeypatch.setitem(POLL_INTERVALS, JobKind.PROGRAM, 0.1)
    image = env.glance.add_image(DATA + b"7")
    env.glance.drip = threading.Event()
    with ThreadPoolExecutor() as pool:
        ended = pool.submit(env.program, image)

        def fetching() -> Any:
            activities = [job["activity"] for job in env.call("GET", "jobs?state=pending")["jobs"]]
            return next((a for a in activities if a and a["done"]), None)

        try:
            activity = wait_until("the job shows the fetched bytes", fetching)
        finally:
            env.glance.drip.set()
        job = ended.result()
    env.glance.drip = None
    assert (activity["step"], activity["total"]) == (f"fetch image {image}", len(DATA) + 1)
    assert 0 < activity["done"] < len(DATA)
    assert (job["state"], job["activity"]) == ("done", None)


def test_image_of_a_device_profile_is_fetched(env: Env) -> None:
    image = env.glance.add_image(DATA + b"2")
    assert env.bind(bitstream_id=image) == ("Bound", None)
    assert env.fetched()[-1][0] == image


def test_image_is_found_by_its_function(env: Env) -> None:
    image = env.glance.add_image(DATA + b"3", **{"accel:function_id": FUNCTION})
    assert env.bind(function_id=FUNCTION) == ("Bound", None)
    assert env.fetched()[-1][0] == image
    state, error = env.bind(function_id="unknown")
    assert (state, "no active image with accel:function_id=unknown" in str(error)) == (
        "BindFailed",
        True,
    )


@pytest.mark.parametrize(
    "name",
    sample(["..", "../../etc/passwd", "%2e%2e%2f", "bitstream.gbs"], "../../etc/passwd"),
)
def test_name_that_is_no_uuid_is_refused(env: Env, name: str) -> None:
    before = {path.name for path in env.spool.iterdir()}
    state, error = env.bind(bitstream_id=name)
    assert (state, "is not a uuid" in str(error)) == ("BindFailed", True)
    assert {path.name for path in env.spool.iterdir()} == before


@pytest.mark.matrix
def test_wrong_images_fail_with_the_reason(env: Env) -> None:
    large = env.glance.add_image(DATA * 3)
    before = env.fetched()
    for image, reason in (
        (str(uuid.uuid4()), "does not exist"),
        (large, "more than the maximum of 2048000"),
    ):
        job = env.program(image)
        assert job["state"] == "failed"
        assert image in job["error"]
        assert reason in job["error"]
        state, error = env.bind(bitstream_id=image)
        assert state == "BindFailed"
        assert reason in str(error)
    assert env.fetched() == before
    assert not (env.spool / large).exists()


def test_changed_data_fail_with_the_reason(env: Env) -> None:
    image = env.glance.add_image(DATA + b"4")
    if isinstance(env.glance, RealGlance):
        env.glance.stored_file(image).write_bytes(DATA + b"5")
    else:
        assert isinstance(env.glance, FakeGlance)
        env.glance.sent[image] = DATA + b"5"
    job = env.program(image)
    assert job["state"] == "failed"
    assert "the sha512 digest of the data is" in job["error"]
    assert not (env.spool / image).exists()


@pytest.mark.matrix
def test_service_killed_during_a_download_completes_the_job_after_its_restart(
    tmp_path: Path,
) -> None:
    with serve_glance(FakeGlance()) as glance:
        glance.gate = threading.Event()
        kept, image = glance.add_image(DATA), glance.add_image(DATA + b"6")
        service = daemon(
            tmp_path,
            DEFAULT={"host": HOST},
            fake={"fetch_images": True},
            glance={"auth_type": "none", "endpoint_override": glance.url},
            conductor={"hello_interval": 0.5, "jobs_interval": 0.5, "lease_timeout": 3},
        )
        spool = tmp_path / "state" / "agent" / f"images-{HOST}"
        service.start()
        try:
            url = endpoint(service)
            (part,) = wait_until("the card is found", lambda: _deployables(url))
            patch: Any = [{"path": "/program", "op": "replace", "value": [{"image_uuid": image}]}]
            path = f"{url}/v2/deployables/{part['uuid']}/program"
            assert requests.patch(path, json=patch, timeout=60).ok
            wait_until("the download has begun", lambda: list(spool.glob(f"{image}.*.part")))
            (spool / kept).write_bytes(DATA)
            service.kill()
            assert list(spool.glob("*.part"))
            glance.gate.set()
            service.log.unlink()
            service.start()
            url = endpoint(service)
            wait_until(
                "the card has the image", lambda: _deployables(url)[0]["bitstream_id"] == image
            )
        finally:
            service.kill()
    assert {path.name for path in spool.iterdir()} == {"lock", kept, image}
    assert (spool / image).read_bytes() == DATA + b"6"


def _deployables(url: str) -> list[dict[str, Any]]:
    return list(requests.get(f"{url}/v2/deployables", timeout=60).json()["deployables"])
