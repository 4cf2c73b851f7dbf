# SPDX-License-Identifier: Apache-2.0
"""Keys of the conductors, with which they sign what they write into the custody logs.

A signature is HMAC-SHA-256 under a key that is not in the database: ``ID:HEX`` with the id of the
key. Whoever can write to the database but has no key can compute hashes, and no signatures.
"""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

from cyborg.core.errors import Invalid

MIN_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys by their ids: the first one signs, all check. Without keys nothing is signed."""

    secrets: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def sign(self, data: bytes) -> str | None:
        """Return the signature of ``data`` under the first key, None without keys."""
        for key_id, secret in self.secrets.items():
            return f"{key_id}:{_compute(secret, data)}"
        return None

    def find_fault(self, data: bytes, signature: str | None) -> str | None:
        """Return why ``signature`` does not prove that a conductor wrote ``data``, else None."""
        if signature is None:
            return "it has no signature" if self.secrets else None
        key_id, _, code = signature.partition(":")
        if (secret := self.secrets.get(key_id)) is None:
            return f"its signature is of the key {key_id[:16]!r}, which is not in the key file"
        if not hmac.compare_digest(_compute(secret, data).encode(), code.encode()):
            return "its signature does not fit it"
        return None


NO_KEYS = Keys()


def parse_keys(text: str) -> Keys:
    """Return the keys of a key file: one in hexadecimal in each line; ``#`` begins a comment.

    Raise Invalid with the number of the line; the message has no part of a key.
    """
    secrets: dict[str, bytes] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not (word := line.partition("#")[0].strip()):
            continue
        try:
            secret = bytes.fromhex(word)
        except ValueError:
            secret = b""
        if len(secret) < MIN_KEY_BYTES:
            raise Invalid(
                f"line {number} is not a key: expected {2 * MIN_KEY_BYTES} or more hexadecimal "
                "digits, such as 'openssl rand -hex 32' prints"
            )
        secrets[hashlib.sha256(b"custody key id" + secret).hexdigest()[:8]] = secret
    if not secrets:
        raise Invalid("there is no key in it")
    return Keys(secrets)


def _compute(secret: bytes, data: bytes) -> str:
    return hmac.digest(secret, data, hashlib.sha256).hex()
