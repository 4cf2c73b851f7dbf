# SPDX-License-Identifier: Apache-2.0
"""Reader of ``/proc/crypto``: the algorithms of the kernel, as a capability tree.

``crypto/proc.c`` of Linux writes the file: records of lines ``key : value`` with a blank line after
each record. ``refcnt`` is 1 for an algorithm that is registered (``crypto_check_alg`` in
``crypto/algapi.c``) and increases by 1 for each transform that uses it (``crypto_mod_get`` in
``crypto/api.c``). A template that is built on an algorithm increases the ``refcnt`` of the
algorithm only when the template itself has a transform (``crypto_register_instance``,
``crypto_spawn_tfm``). A self-test adds references until ``selftest`` is ``passed``.
"""

import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyborg.drivers.kernel.crypto import Family
from cyborg.drivers.sysfs import read_file

MAX_BYTES = 1024 * 1024  # of the file; a kernel with all algorithms has 150 KiB
MAX_NAME = 128  # CRYPTO_MAX_ALG_NAME of <linux/crypto.h>
_MAX_DEPTH = 8  # of nested templates in a name
_LINE = re.compile(r"([a-z]+(?: [a-z]+)*) *: (.*)")
_TOKEN = re.compile(r"[A-Za-z0-9_.+/-]+|[(),]")
_KEYS = ("name", "driver", "module", "refcnt", "selftest", "type")
_LARVAL = "larval"  # a placeholder of an algorithm that is being tested
# The kinds of algorithms by the names of the services of Intel QAT, which sysfs-driver-qat defines.
_SERVICES: Mapping[str, str] = {
    **dict.fromkeys(("cipher", "skcipher", "lskcipher", "aead", "ahash", "shash"), "sym"),
    **dict.fromkeys(("akcipher", "sig", "kpp"), "asym"),
    **dict.fromkeys(("compression", "scomp", "acomp"), "dc"),
    "rng": "rng",
}

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An algorithm that a kernel module implements.

    ``driver`` is the name of the implementation. ``users`` is the number of transforms that use it.
    """

    name: str
    driver: str
    module: str
    kind: str
    users: int

    def belongs_to(self, family: Family) -> bool:
        """Return whether accelerators of a family compute the algorithm."""
        if self.module == "kernel":
            return family.algorithms.fullmatch(self.driver) is not None
        return self.module == family.module


def read_algorithms(proc_root: Path) -> tuple[Algorithm, ...]:
    """Return the algorithms that passed their self-test, from ``crypto`` in a ``/proc`` folder.

    Return an empty tuple without the file. Only the first MAX_BYTES are read.
    """
    try:
        return parse(read_file(proc_root / "crypto", MAX_BYTES).decode(errors="replace"))
    except OSError:
        return ()


def parse(text: str) -> tuple[Algorithm, ...]:
    """Return the algorithms that passed their self-test, from a text like ``/proc/crypto``.

    A record that is malformed, incomplete or of an unknown kind is ignored.
    """
    # Without its blank line, the last record may have been cut off at MAX_BYTES.
    records, end, _ = text.rpartition("\n\n")
    parsed = [_parse_record(record) for record in records.split("\n\n")] if end else []
    # A larval record is of a self-test, which adds references: its algorithm would count as used.
    in_test = {record["driver"] for record in parsed if record and record["type"] == _LARVAL}
    algorithms: list[Algorithm] = []
    for record in parsed:
        if not record or record["selftest"] != "passed" or record["driver"] in in_test:
            continue
        if record["type"] not in _SERVICES:
            continue
        algorithms.append(
            Algorithm(
                name=record["name"],
                driver=record["driver"],
                module=record["module"],
                kind=record["type"],
                users=max(0, int(record["refcnt"]) - 1),
            )
        )
    return tuple(algorithms)


def _parse_record(text: str) -> dict[str, str]:
    """Return the values of a record by key; an empty dictionary if the record is not valid."""
    record: dict[str, str] = {}
    for line in text.strip("\n").split("\n"):
        match = _LINE.fullmatch(line)
        if match is None or match[1] in record:
            return {}
        record[match[1]] = match[2]
    if not all(0 < len(record.get(key, "")) <= MAX_NAME for key in _KEYS):
        return {}
    refcnt = record["refcnt"]
    # The kernel counts with 32 bits, which have at most ten decimal digits.
    is_count = refcnt.isascii() and refcnt.isdigit() and len(refcnt) <= 10
    return record if is_count else {}


def build_tree(algorithms: Iterable[Algorithm]) -> Tree:
    """Return the capability tree of algorithms: service, primitive, mode.

    For example, ``cbc(aes)`` and ``rsa`` are ``{"sym": {"aes": {"cbc": 1}}, "asym": {"rsa": 1}}``.
    An algorithm whose name is not valid is omitted.
    """
    tree: Tree = {}
    for algorithm in algorithms:
        service = _SERVICES[algorithm.kind]
        name = parse_name(algorithm.name, first_is_primitive=service == "asym")
        if name is None:
            continue
        primitive, mode = name
        # The value of a primitive is 1 until one of its modes is known, and then has these.
        branch = tree.setdefault(service, {})
        if not mode:
            branch.setdefault(primitive, 1)
        else:
            modes = branch.get(primitive)
            branch[primitive] = {**(modes if isinstance(modes, dict) else {}), mode: 1}
    return tree


def parse_name(name: str, *, first_is_primitive: bool = False) -> tuple[str, str] | None:
    """Return the primitive and the mode of an algorithm's name; None if it is malformed.

    A name is a primitive, or a template with names as arguments. The primitive is in the last
    argument, or with ``first_is_primitive`` in the first argument: ``rfc3686(ctr(aes))`` is ``aes``
    with the mode ``rfc3686_ctr``, and ``authenc(hmac(sha1),cbc(aes))`` is ``aes`` with the mode
    ``cbc_hmac_sha1``.
    """
    tokens = deque[str](_TOKEN.findall(name))
    if len(name) > MAX_NAME or "".join(tokens) != name:
        return None
    parts = _take_expression(tokens, depth=0, first_is_primitive=first_is_primitive)
    if parts is None or tokens:
        return None
    primitive, *modes = parts
    return primitive, "_".join(modes)


def _take_expression(
    tokens: deque[str], *, depth: int, first_is_primitive: bool
) -> list[str] | None:
    """Take an expression from the tokens; return ``[primitive, *modes]``, None if malformed.

    An expression is a word, or a word with expressions as arguments. ``depth`` is the number of
    expressions around it. Tokens that follow the expression are left.
    """
    if depth > _MAX_DEPTH or not tokens or tokens[0] in "(),":
        return None
    word = tokens.popleft()
    if not tokens or tokens[0] != "(":
        return [word]
    arguments: list[list[str]] = []
    while tokens and tokens[0] in ("(", ","):
        tokens.popleft()
        argument = _take_expression(tokens, depth=depth + 1, first_is_primitive=first_is_primitive)
        if argument is None:
            return None
        arguments.append(argument)
    if not tokens or tokens.popleft() != ")":
        return None
    primitive, *modes = arguments.pop(0 if first_is_primitive else -1)
    # The words of the other arguments as in the name: hmac, sha1 for hmac(sha1).
    others = [part for primitive_, *rest in arguments for part in (*rest, primitive_)]
    # authenc means that the other argument authenticates.
    template = [] if word in ("authenc", "authencesn") and others else [word]
    return [primitive, *template, *modes, *others]
