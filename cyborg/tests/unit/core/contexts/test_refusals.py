# SPDX-License-Identifier: Apache-2.0
"""The last failure that is kept with a device context."""

from datetime import datetime

from cyborg.core.contexts.refusals import (
    MAX_REASONS,
    MAX_SHOWN,
    PREPARE_FAILED,
    describe_to_owner,
    make_job_failure,
    make_refusal,
)
from cyborg.core.explain.predicates import Predicate
from cyborg.core.text import to_iso, to_text

NOW = datetime(2026, 1, 2, 3, 4, 5, 678)
AT = to_iso(NOW)


def reason(
    provider: str, predicate: Predicate, text: str, handles: int, group: int = 0
) -> dict[str, object]:
    return {
        "provider": provider,
        "code": predicate.value,
        "reason": text,
        "handles": handles,
        "group": group,
    }


def test_refusal_hides_details_of_devices_and_shows_those_of_the_request() -> None:
    reasons = {
        "arq": [
            reason("p", Predicate.TRAIT_MISSING, "trait missing: CUSTOM_A", 2),
            reason("p", Predicate.ATTACH_TARGET, "device 0000:3b:00.0 has no physical_network", 1),
        ]
    }
    refusal = make_refusal("", reasons, {"p": "compute-1"}, NOW)
    assert refusal.text == (
        f"refused at {to_text(AT)}: group 0: trait missing: CUSTOM_A (2 handles); "
        "group 0: handle cannot be attached to the target of the group (1 handles)"
    )
    assert (refusal.code, refusal.hostname) == ("trait_missing", "compute-1")
    document = refusal.to_dict()
    assert (document["at"], document["groups"][0]["provider"]) == (AT, "p")
    assert "0000:3b" not in str(document)


def test_text_of_a_refusal_names_neither_host_nor_provider() -> None:
    reasons = {"a": [reason("p-1", Predicate.TAKEN, "", 3)]}
    text = make_refusal("", reasons, {"p-1": "compute-1"}, NOW).text
    assert text == f"refused at {to_text(AT)}: group 0: handle is taken (3 handles)"


def test_refusal_of_many_arqs_counts_handles_once() -> None:
    reasons = {str(n): [reason("p", Predicate.TAKEN, "", 16)] for n in range(40)}
    (group,) = make_refusal("", reasons, {}, NOW).groups
    assert group.handles == 16


def test_refusal_of_many_groups_is_bounded() -> None:
    reasons = {str(n): [reason(f"p{n}", Predicate.TAKEN, "", 16, n)] for n in range(40)}
    refusal = make_refusal("", reasons, {}, NOW)
    assert len(refusal.groups) == MAX_REASONS
    assert f"{MAX_REASONS - MAX_SHOWN} more" in refusal.text
    assert refusal.hostname is None


def test_refusal_without_reasons_has_the_message() -> None:
    refusal = make_refusal("claimed concurrently", {}, {}, NOW)
    assert refusal.text == f"refused at {to_text(AT)}: claimed concurrently"
    assert refusal.code == "refused"


def test_owner_of_an_attachment_gets_no_details_of_devices() -> None:
    device = "device 0000:3b:00.0 has no physical_network"
    reasons = {"arq": [reason("p", Predicate.ATTACH_TARGET, device, 1)]}
    assert describe_to_owner(f"no free attach handle: {device}", reasons) == (
        "no free attach handle: group 0: handle cannot be attached to the target of the group "
        "(1 handles)"
    )
    assert describe_to_owner("claimed concurrently", {}) == "claimed concurrently"


def test_failed_job_has_its_error() -> None:
    failure = make_job_failure(
        PREPARE_FAILED, "checksum differs", NOW, hostname="compute-1", job="job"
    )
    assert failure.text == "checksum differs"
    assert failure.to_dict() == {
        "at": AT,
        "code": "prepare_failed",
        "reason": "checksum differs",
        "hostname": "compute-1",
        "job": "job",
        "groups": [],
        "detail": None,
    }


def test_failed_job_hides_names_and_addresses_from_the_owner() -> None:
    image, other = (f"{n}f1d0d9e-7a54-4c0f-9a2e-6d1f4d8f3b11" for n in (1, 2))
    error = (
        f"prepare of 0000:3b:00.0-region0: image {image} of node-1: checksum differs; "
        f"[Errno 13] Permission denied: '/sys/bus/pci/devices/0000:3b:00.0/x', 3b:00.1, "
        f"https://glance.internal:9292/v2 and 10.0.0.7:80, mdev {other}, node-10 and region0"
    )
    failure = make_job_failure(
        *(PREPARE_FAILED, error, NOW),
        hostname="node-1",
        job="job",
        names={"0000:3b:00.0", "0000:3b:00.0-region0", ""},
        requested={image},
    )
    assert failure.text == (
        f"prepare of (hidden): image {image} of (hidden): checksum differs; "
        "[Errno 13] Permission denied: '(hidden)', (hidden), "
        "(hidden) and (hidden), mdev (hidden), node-10 and region0"
    )
    assert failure.detail == error
