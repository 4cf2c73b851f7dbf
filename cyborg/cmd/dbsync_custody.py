# SPDX-License-Identifier: Apache-2.0
"""``cyborg-dbsync sign-custody``: sign custody logs that were written without the present key.

Conductors accept only what has a signature of one of their keys. An operator who sets, or has lost,
the key decides with this command that the present logs, as far as their hashes fit, are genuine.
One who gives up the key removes all signatures; each log then has an event that says so.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import sqlalchemy as sa

from cyborg.core.custody import Entry, Event, Log, SealedRecord, serialize_new, verify
from cyborg.core.errors import Conflict, Misconfigured
from cyborg.db import errors
from cyborg.db.custody import chains, read
from cyborg.db.custody import write as custody
from cyborg.db.unit_of_work import UnitOfWork

PAGE_SIZE = 500  # records, and heads, that are read together


@dataclass(slots=True)
class SignResult:
    """Numbers of chains and of new records that were signed, and why others were not."""

    chains: int = 0
    records: int = 0
    refused: list[str] = field(default_factory=list)


def add_parser(parsers: Any) -> None:
    """Add the command to those of ``cyborg-dbsync``."""
    parser = parsers.add_parser(
        "sign-custody", help="sign custody logs that were written without the key"
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--replace", action="store_true", help="also those with a signature that does not fit"
    )
    group.add_argument(
        "--remove",
        action="store_true",
        help="remove all signatures, for conductors without a key, and record this in each log",
    )
    parser.set_defaults(run=_run)


def _run(engine: sa.Engine, conf: Any) -> None:
    keys = custody.load(conf)
    if conf.verb.remove:
        if keys.secrets:
            raise Misconfigured(
                "[conductor] custody_key_file is set, expected none: remove it from the "
                "configuration of all conductors, and restart them",
                option="[conductor] custody_key_file",
            )
        with errors.translate():
            result = remove_signatures(UnitOfWork(engine))
        sys.stdout.write(
            f"removed the signatures of {result.chains} chains and {result.records} new records: "
            "nothing proves now that conductors wrote them\n"
        )
        return
    if not keys.secrets:
        raise Misconfigured(
            "[conductor] custody_key_file is not set: there is no key to sign with",
            option="[conductor] custody_key_file",
        )
    with errors.translate():
        uow = UnitOfWork(custody.attach(engine, keys))
        result = sign_custody(uow, replace=conf.verb.replace)
    sys.stdout.write(f"signed {result.chains} chains and {result.records} new records\n")
    for line in result.refused:
        sys.stdout.write(f"not signed: {line}\n")
    if result.refused:
        raise Conflict(f"{len(result.refused)} chains or records were not signed")


def sign_custody(uow: UnitOfWork, *, replace: bool) -> SignResult:
    """Sign the chains whose hashes fit, and the new records, that have no signature.

    With ``replace`` also those that have a signature which does not fit, or of an unknown key.
    """
    result, after = SignResult(), ""
    while uuids := uow.run(partial(chains.next_devices, after=after, limit=PAGE_SIZE)):
        for uuid in uuids:
            reason = uow.run(partial(_sign_chain, uuid=uuid, replace=replace))
            if reason:
                result.refused.append(f"device {uuid}: {reason}")
            elif reason is not None:
                result.chains += 1
        after = uuids[-1]
    last = 0
    while rows := uow.run(partial(chains.new_records_after, last=last, limit=PAGE_SIZE)):
        signed, refused = uow.run(partial(_sign_new, rows=rows, replace=replace))
        result.records += signed
        result.refused += refused
        # By id, since signing does not take a record out of the list.
        last = rows[-1]["id"]
    return result


def remove_signatures(uow: UnitOfWork) -> SignResult:
    """Remove the signatures of all chains and new records; record it in each of these chains."""
    result, after = SignResult(records=uow.run(chains.remove_new_signatures)), ""

    def remove(tx: sa.Connection) -> list[tuple[str, str]]:
        found = chains.remove_signatures(tx, after, PAGE_SIZE)
        custody.add(
            tx, [Entry(*chain, Event.SIGNATURES_REMOVED, {}) for chain in found], uow.clock()
        )
        return found

    while found := uow.run(remove):
        result.chains += len(found)
        after = found[-1][0]
    return result


def _sign_new(
    tx: sa.Connection, rows: Sequence[chains.UnsealedRow], *, replace: bool
) -> tuple[int, list[str]]:
    """Sign new records; return their number, and why others are not signed."""
    keys, refused = custody.keys_of(tx), []
    signatures: dict[int, str] = {}
    for row in rows:
        data = serialize_new(read.to_record(row))
        if (reason := keys.find_fault(data, row["signature"])) is None:
            continue
        if row["signature"] is not None and not replace:
            refused.append(f"record {row['uuid']}: {reason} (see --replace)")
        else:
            signatures[row["id"]] = keys.sign(data) or ""
    chains.save_signatures(tx, signatures)
    return len(signatures), refused


def _sign_chain(tx: sa.Connection, uuid: str, *, replace: bool) -> str | None:
    """Sign a chain; return "" if it was signed, None if it was already, else why it is not."""
    # Conductors lock a head while they add to the chain; without waiting for them, one busy
    # chain does not hold up the others.
    locked = chains.lock_heads(tx, [uuid])
    if not locked:
        return "its head is locked by another transaction: try again"
    (head,) = locked
    if (reason := chains.find_fault(tx, head)) is None:
        return None
    if head["signature"] is not None and not replace:
        return f"{reason} (see --replace)"
    ends = read.to_head(head)
    fault = verify(Log(ends, _read(tx, uuid), ends), None)[1]
    if fault is not None:
        return fault.explanation
    chains.sign_head(tx, head)
    return ""


def _read(tx: sa.Connection, uuid: str) -> Iterator[SealedRecord]:
    after: int | None = None
    while page := read.sealed_after(tx, uuid, after, PAGE_SIZE):
        yield from page
        after = page[-1].record.sequence
