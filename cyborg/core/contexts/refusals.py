# SPDX-License-Identifier: Apache-2.0
"""The last failure of a device context: a refused bind or reservation, or failed work of a host.

It is kept with the context as a text and as values. The text is for the owner of the context, who
may know neither hosts, resource providers and addresses of devices, nor owners of handles. The
values also have the host, the resource providers and the job, for administrators. They are read
after the cause has passed.

The error of a job is a text of a driver, which may name anything on the host. The owner gets it
without these names instead of not at all: it says what to correct, such as a wrong checksum.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import chain
from typing import Any

from cyborg.core.explain.predicates import MATCHING, Failure, Predicate
from cyborg.core.text import join_limited, to_iso, to_text

MAX_REASONS = 32  # of one refusal
MAX_SHOWN = 8  # in a text
MAX_TEXT = 300  # characters of one reason
# Code of a refusal without a predicate, such as one because of concurrent calls.
REFUSED = "refused"
# Code of a bind or reservation whose device the host could not prepare.
PREPARE_FAILED = "prepare_failed"
# Code of a former handle that the host could not clean.
CLEAN_FAILED = "clean_failed"
# What replaces names and addresses in the error of a job.
HIDDEN = "(hidden)"
_UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
# A path may contain an address, so it comes first.
_PATHS = (
    rf"(?P<uuid>(?<![\w-]){_UUID}(?![\w-]))"
    r"|\b\w+://\S+"  # URLs, such as of an image
    r"|(?<![\w.])/[\w.+:@-]+(?:/[\w.+:@-]*)*"
)
_ADDRESSES = (
    r"\b(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]\b"  # PCI functions
    r"|\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"  # IP addresses
)
# Predicates whose details are about what was requested, such as a trait.
_OF_REQUEST = MATCHING | {Predicate.NUMA_NODE}


@dataclass(frozen=True, slots=True)
class FailedGroup:
    """A predicate that handles of a provider failed for a group, and their number."""

    group: int | None
    provider: str
    code: str
    reason: str
    handles: int


@dataclass(frozen=True, slots=True)
class ContextFailure:
    """What failed, when, and on which host; ``groups`` are the reasons of a refusal.

    ``code`` is the first predicate that failed, or one of the codes of this module. ``at`` is in
    ISO 8601. ``hostname`` is None if it is not known, ``job`` the uuid of the failed job.
    ``detail`` is the reason with what the owner may not know, None if there is nothing of this.
    """

    at: str
    code: str
    reason: str
    hostname: str | None = None
    job: str | None = None
    groups: tuple[FailedGroup, ...] = ()
    detail: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the failure as plain values."""
        return asdict(self) | {"groups": [asdict(group) for group in self.groups]}

    @property
    def text(self) -> str:
        """Return the failure as a text for the owner of the context."""
        if self.code in (PREPARE_FAILED, CLEAN_FAILED):
            return self.reason
        texts = [_describe(group) for group in self.groups]
        shown = join_limited(list(dict.fromkeys(texts)), MAX_SHOWN, separator="; ")
        return f"refused at {to_text(self.at)}: {shown or self.reason}"


def make_refusal(
    message: str,
    reasons: Mapping[str, Sequence[Mapping[str, object]]],
    hosts: Mapping[str, str],
    now: datetime,
) -> ContextFailure:
    """Return a refusal, with the predicates that failed by group and resource provider.

    ``reasons`` are those of NoHandle, by ARQ; ``hosts`` has the hosts of providers. ``message`` is
    used if there are no reasons.
    """
    groups = _failed_groups(reasons)
    if not groups:
        return ContextFailure(to_iso(now), REFUSED, message[:MAX_TEXT])
    hostnames = {hosts[group.provider] for group in groups if group.provider in hosts}
    return ContextFailure(
        to_iso(now),
        groups[0].code,
        groups[0].reason,
        # All ARQs of a bind are bound on one host.
        hostname=min(hostnames, default=None),
        groups=groups,
    )


def _failed_groups(
    reasons: Mapping[str, Sequence[Mapping[str, object]]],
) -> tuple[FailedGroup, ...]:
    """Return the predicates that failed, without details of devices; at most MAX_REASONS.

    ``reasons`` are those of NoHandle, by ARQ.
    """
    groups: dict[tuple[int | None, str, str], FailedGroup] = {}
    for reason in chain.from_iterable(reasons.values()):
        group, provider = _number(reason.get("group")), str(reason["provider"])
        handles, text = _number(reason["handles"]) or 0, _public_text(reason)
        key = group, provider, text
        # The ARQs of a group fail for the same handles: do not add their numbers.
        if key in groups:
            handles = max(handles, groups[key].handles)
        groups[key] = FailedGroup(group, provider, str(reason["code"]), text, handles)
    return tuple(groups.values())[:MAX_REASONS]


def describe_to_owner(message: str, reasons: Mapping[str, Sequence[Mapping[str, object]]]) -> str:
    """Return the message of NoHandle without what the owner of an attachment may not know.

    ``reasons`` are those of NoHandle; without any, the message is returned as it is.
    """
    texts = list(dict.fromkeys(_describe(group) for group in _failed_groups(reasons)))
    if not texts:
        return message
    return f"no free attach handle: {join_limited(texts, MAX_SHOWN, separator='; ')}"


def make_job_failure(
    code: str,
    error: str,
    now: datetime,
    *,
    hostname: str | None = None,
    job: str | None = None,
    names: Collection[str] = (),
    requested: Collection[str] = (),
) -> ContextFailure:
    """Return the failure of a job on a host; ``error`` is that of the job.

    ``names`` are hidden from the owner, as are the host, paths, URLs, addresses and uuids, except
    those in ``requested``: values that the owner has given, such as an image.
    """
    reason = hide_names(error, {*names, *([hostname] if hostname else [])}, requested)
    detail = None if reason == error else error
    return ContextFailure(to_iso(now), code, reason, hostname=hostname, job=job, detail=detail)


def hide_names(text: str, names: Collection[str], requested: Collection[str] = ()) -> str:
    """Return a text without names and addresses, except uuids in ``requested``."""

    def replace(match: re.Match[str]) -> str:
        return match[0] if match["uuid"] in requested else HIDDEN

    # The longest first: the address of a handle may begin with that of its device.
    escaped = [re.escape(name) for name in sorted(filter(None, names), key=len, reverse=True)]
    patterns = [_PATHS, *(rf"(?<![\w.:-]){name}(?![\w-])" for name in escaped), _ADDRESSES]
    return re.sub("|".join(patterns), replace, text)


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _describe(group: FailedGroup) -> str:
    number = "" if group.group is None else f"group {group.group}: "
    return f"{number}{group.reason} ({group.handles} handles)"


def _public_text(reason: Mapping[str, object]) -> str:
    """Return the text of a reason: details only of what was requested, such as a trait."""
    return public_text(Failure(Predicate(str(reason["code"])), str(reason["reason"])))


def public_text(failure: Failure) -> str:
    """Return the text of a failure, without the details of devices and handles."""
    predicate = failure.predicate
    return (failure.text if predicate in _OF_REQUEST else predicate.description)[:MAX_TEXT]
