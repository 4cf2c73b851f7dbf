# SPDX-License-Identifier: Apache-2.0
"""From the section [glance] to an image store."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from oslo_config import cfg

from cyborg import conf as options
from cyborg.agent.backends.catalogue import DriverCatalogue
from cyborg.agent.backends.factory import DriverFactory
from cyborg.agent.images.store import GlanceImageStore, make_image_store
from cyborg.core.errors import DriverFailed, Misconfigured, Unavailable
from cyborg.testing.fake_glance import FakeGlance

UUID = "4d5b0d6a-8f8c-4f67-9f4e-3f2d1c0b9a87"
NONE = "auth_type = none\nendpoint_override = http://127.0.0.1:1\n"


def read(folder: Path, text: str) -> cfg.ConfigOpts:
    path = folder / "cyborg.conf"
    path.write_text(f"[DEFAULT]\nhost = compute-1\nstate_path = {folder}/state\n{text}")
    conf = cfg.ConfigOpts()
    options.register(conf, options.AGENT_GROUPS)
    conf([], project="cyborg", default_config_files=[str(path)], default_config_dirs=[])
    return conf


@pytest.mark.parametrize("text", ["", "[glance]\n", "[glance]\nmax_image_size = 5\n"])
def test_store_without_service_refuses_with_the_remedy(text: str, tmp_path: Path) -> None:
    store = make_image_store(read(tmp_path, text))
    with pytest.raises(DriverFailed, match=r"no image service; set the section \[glance\]"):
        store.open(UUID)
    with pytest.raises(DriverFailed, match="no image service"):
        store.find({"accel:function_id": "F"})
    store.close()
    assert not (tmp_path / "state").exists()


def test_store_with_service_fetches_into_the_state_directory(
    glance: FakeGlance, tmp_path: Path
) -> None:
    uuid = glance.add_image(b"data")
    # The endpoint of a catalogue may end with the version.
    for suffix in ("", "/v2", "/v2/"):
        text = f"[glance]\nauth_type = none\nendpoint_override = {glance.url}{suffix}\n"
        store = make_image_store(read(tmp_path, text))
        with store.open(uuid) as image:
            assert image.path == tmp_path / "state/agent/images-compute-1" / uuid
            assert image.path.read_bytes() == b"data"
        store.close()
    assert set(glance.requested_paths) == {f"/v2/images/{uuid}", f"/v2/images/{uuid}/file"}


def test_store_uses_the_limits_of_the_section(glance: FakeGlance, tmp_path: Path) -> None:
    text = (
        f"[glance]\nauth_type = none\nendpoint_override = {glance.url}\nretries = 0\n"
        f"max_image_size = 3\ncache_size = 3\nspool_directory = {tmp_path}/spool\n"
    )
    store = make_image_store(read(tmp_path, text))
    assert isinstance(store, GlanceImageStore)
    large = glance.add_image(b"data")
    with pytest.raises(DriverFailed, match="more than the maximum of 3"), store.open(large):
        pytest.fail("the image was opened")
    with store.open(glance.add_image(b"abc")) as image:
        assert image.path.parent == tmp_path / "spool"
    store.close()


@pytest.mark.parametrize(
    ("text", "option", "message"),
    [
        (f"{NONE}cache_size = 5\n", "glance.cache_size", "found 5; expected at least"),
        ("auth_type = unknown\n", "glance.auth_type", "unknown"),
        ("auth_type = password\n", "glance.auth_type", "auth_url"),
        (f"{NONE}require_signature = true\n", "glance.trusted_certificates", "found none"),
        (f"{NONE}spool_directory = /proc/nowhere\n", "glance.spool_directory", "cannot be used"),
    ],
)
def test_unusable_section_is_rejected(text: str, option: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=rf"\[glance\].*{message}") as raised:
        make_image_store(read(tmp_path, f"[glance]\n{text}"))
    assert raised.value.details["option"] == option


def test_required_signature_without_its_extra_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "cyborg.agent.images.signature", raising=False)
    monkeypatch.setitem(sys.modules, "cursive", None)
    text = f"[glance]\n{NONE}require_signature = true\ntrusted_certificates = {UUID}\n"
    with pytest.raises(Misconfigured, match=r"pip install 'cyborg\[signatures\]'"):
        make_image_store(read(tmp_path, text))


def test_keystone_that_does_not_answer_is_unavailable(glance: FakeGlance, tmp_path: Path) -> None:
    glance.hang = threading.Event()
    text = (
        f"[glance]\nauth_type = password\nauth_url = {glance.url}/v3\nusername = u\n"
        "password = p\nproject_name = p\nrequest_timeout = 0.1\nretries = 0\n"
    )
    store = make_image_store(read(tmp_path, text))
    message = f"image {UUID}: no token or endpoint for Glance"
    with pytest.raises(Unavailable, match=message), store.open(UUID):
        pytest.fail("the image was opened")
    store.close()


def test_drivers_get_the_store(tmp_path: Path) -> None:
    conf = read(tmp_path, f"[agent]\nenabled_drivers = fake\n[glance]\n{NONE}")
    store = make_image_store(conf)
    (driver,) = DriverFactory(conf, DriverCatalogue(), images=store).load_all({})
    assert driver.images is store
    store.close()


SCRIPT = """
import sys
from oslo_config import cfg
from cyborg import conf as options
from cyborg.agent.images.store import make_image_store

conf = cfg.ConfigOpts()
options.register(conf, options.AGENT_GROUPS)
conf([], project="cyborg", default_config_files=[sys.argv[1]], default_config_dirs=[])
make_image_store(conf)
print(*sorted({"keystoneauth1", "requests", "cursive", "castellan"} & set(sys.modules)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "imported"), [("", []), (f"[glance]\n{NONE}", ["keystoneauth1", "requests"])]
)
def test_libraries_are_imported_only_if_needed(
    text: str, imported: list[str], tmp_path: Path
) -> None:
    read(tmp_path, text)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "cyborg.conf"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == imported


def test_spool_of_a_replayed_host_is_not_that_of_the_machine(
    glance: FakeGlance, tmp_path: Path
) -> None:
    text = f"[glance]\nauth_type = none\nendpoint_override = {glance.url}\n"
    uuid = glance.add_image(b"data")
    machine = make_image_store(read(tmp_path, text))
    replayed = make_image_store(read(tmp_path, f"[agent]\nreplay = capture\n{text}"))
    with machine.open(uuid) as image, replayed.open(uuid) as other:
        assert image.path == tmp_path / "state/agent/images-compute-1" / uuid
        assert other.path == tmp_path / "state/agent/replay/images-compute-1" / uuid
    machine.close()
    replayed.close()
