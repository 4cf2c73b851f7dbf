# SPDX-License-Identifier: Apache-2.0
"""Selectors of attachments: exactly one, and what the selected object must be."""

import re
from typing import Any
from uuid import uuid4

import pytest

from cyborg.core.attachments import selector
from cyborg.core.attachments.attachment import AttachmentState
from cyborg.core.binding.accelerator import AcceleratorState
from cyborg.core.contexts.states import LEASED, USABLE, ContextState
from cyborg.core.errors import Conflict, Invalid, WrongState

UUID, OTHER = str(uuid4()), str(uuid4())


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({}, "device_profile"),
        ({"device_profile": None}, "device_profile"),
        ({"device_profile": "p", "device_context": UUID}, "device_context"),
        ({"device_profile": "p", "accelerator": UUID}, "accelerator"),
        ({"device_context": UUID, "accelerator": UUID}, "accelerator"),
        ({"device_profile": "p", "device_context": UUID, "accelerator": UUID}, "accelerator"),
        ({"device_profile": ""}, "device_profile"),
        ({"device_profile": 1}, "device_profile"),
        ({"device_profile": f"ctx-{UUID}"}, "device_profile"),
        ({"device_profile": f"Acc-{UUID}"}, "device_profile"),
        ({"device_context": "gzip"}, "device_context"),
        ({"device_context": 1}, "device_context"),
        ({"accelerator": ""}, "accelerator"),
        ({"accelerator": [UUID]}, "accelerator"),
    ],
)
def test_bad_selectors_are_refused_with_the_field(request_: dict[str, Any], field: str) -> None:
    with pytest.raises(Invalid) as found:
        selector.parse_selector(request_)
    assert found.value.details["field"] == field


def test_each_selector_has_values_and_a_key_of_its_own() -> None:
    parsed = [
        selector.parse_selector({field: UUID})
        for field in ("device_profile", "device_context", "accelerator")
    ]
    assert [(item.field, item.value) for item in parsed] == [
        (field, UUID) for field in selector.SELECTORS
    ]
    assert len({item.key for item in parsed}) == 3
    profile, context, accelerator = parsed
    nothing = {"device_context": None, "accelerator": None}
    assert profile.values() == nothing | {"device_profile_name": UUID}
    assert context.values() == nothing | {
        "device_profile_name": f"ctx-{UUID}",
        "device_context": UUID,
    }
    # The name of the hidden profile depends on the attachment: a repeated request has none.
    assert accelerator.values() == nothing | {"accelerator": UUID}
    names = [item.profile_name(OTHER) for item in parsed]
    assert names == [UUID, f"ctx-{UUID}", f"acc-{OTHER}"]


@pytest.mark.parametrize("state", ContextState)
def test_context_must_own_no_handle_or_have_a_lease(state: ContextState) -> None:
    if state in USABLE | LEASED:
        selector.check_context(UUID, state=state, project="p", instance=None, server_project="p")
        return
    with pytest.raises(WrongState, match=f"is {state}, instance {OTHER}; only") as found:
        selector.check_context(UUID, state=state, project="p", instance=OTHER, server_project="p")
    assert found.value.details["field"] == "device_context"


def test_context_of_another_project_is_a_conflict() -> None:
    with pytest.raises(Conflict, match="belongs to project q, and the server to project p"):
        selector.check_context(
            UUID, state=ContextState.UNBOUND, project="q", instance=None, server_project="p"
        )


@pytest.mark.parametrize("state", AcceleratorState)
def test_accelerator_must_be_free(state: AcceleratorState) -> None:
    if state is AcceleratorState.FREE:
        selector.check_accelerator(UUID, state)
        return
    with pytest.raises(WrongState, match=f"is {state}, only a free") as found:
        selector.check_accelerator(UUID, state)
    assert found.value.details["field"] == "accelerator"


@pytest.mark.parametrize(
    ("prefix", "instead"),
    [("ctx-", "its device context as device_context"), ("acc-", "accelerator as accelerator")],
)
def test_hidden_profile_names_what_to_give_instead(prefix: str, instead: str) -> None:
    with pytest.raises(Invalid, match=instead):
        selector.parse_selector({"device_profile": prefix + UUID})


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (AttachmentState.ATTACHING, "is being attached .*: wait"),
        (AttachmentState.ATTACHED, "detach it with detach-instance first"),
        (AttachmentState.DETACHING, "is being detached .*: wait"),
    ],
)
def test_context_of_an_attachment_says_what_to_do(state: AttachmentState, text: str) -> None:
    error = selector.attached_error(UUID, OTHER, "compute-1", state)
    assert re.search(text, error.message)
    assert f"server {OTHER}" in error.message
    assert error.details["device_context"] == UUID
    error = selector.attached_error(UUID, None, "compute-1", state)
    assert re.search(text.replace("detach-instance", "detach-host"), error.message)
    assert "host compute-1" in error.message


def test_attachment_of_several_accelerators_is_detached_as_a_whole() -> None:
    selector.check_whole(OTHER, [], UUID)
    selector.check_whole(OTHER, [UUID], UUID)
    with pytest.raises(Conflict, match="detached as a whole") as found:
        selector.check_whole(OTHER, [UUID, "b", "a"], UUID)
    assert found.value.details["accelerators"] == ["a", "b"]


def test_description_names_what_is_attached() -> None:
    assert selector.describe("p", None, None) == "profile p"
    assert selector.describe(f"ctx-{UUID}", UUID, None) == f"device context {UUID}"
    assert selector.describe(f"acc-{OTHER}", None, UUID) == f"accelerator {UUID}"
