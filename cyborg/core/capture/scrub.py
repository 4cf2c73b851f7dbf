# SPDX-License-Identifier: Apache-2.0
"""Replacement of the values in a capture that identify a host or a device.

Serial numbers, UUIDs and other unique ids, MAC addresses and mount points are replaced by values of
the same form, which a keyed hash derives. Within a capture, equal values have equal replacements.
The key of the hash, the salt, is not stored, so that the same value has different replacements in
two captures.
"""

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cyborg.core.capture.model import Capture, Folder

# Names of attributes whose whole value identifies a device or a host.
UNIQUE = frozenset(
    {
        *("serial", "serial_number", "unique_id", "subsysnqn", "wwid", "nguid", "eui", "uuid"),
        *("phys_switch_id", "phys_port_id", "hostnqn", "hostid", "board_serial", "vpd", "dsn"),
    }
)

_UUID = re.compile(r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
_MAC = re.compile(r"(?<![0-9a-fA-F:])(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}(?![0-9a-fA-F:])")
# They identify no device.
_NO_MAC = ("00:00:00:00:00:00", "ff:ff:ff:ff:ff:ff")
_MOUNTS = re.compile(r"proc/[^/]+/mountinfo")


@dataclass(frozen=True, slots=True, eq=False)
class Scrubber:
    """Replacement of identifying values with one salt."""

    # Not in a log: with the salt, the values can be guessed.
    salt: bytes = field(repr=False)

    def scrub(self, capture: Capture) -> Capture:
        """Return the capture without values that identify the host or its devices."""
        folders = {
            self._text(path): Folder(
                {self._text(n): self._content(f"{path}/{n}", c) for n, c in folder.files.items()},
                {self._text(n): self._text(target) for n, target in folder.links.items()},
            )
            for path, folder in capture.folders.items()
        }
        return replace(
            capture,
            folders=folders,
            unreadable={self._text(p): error for p, error in capture.unreadable.items()},
            uevents=tuple(replace(e, path=self._text(e.path)) for e in capture.uevents),
            nvml={
                address: {k: self._text(v) if isinstance(v, str) else v for k, v in facts.items()}
                for address, facts in capture.nvml.items()
            },
            scrubbed=True,
        )

    def value(self, text: str) -> str:
        """Return a value of the same form: each digit and letter is replaced by one of its kind.

        Hexadecimal digits stay hexadecimal digits, in the same case.
        """
        stream = self._stream(text, len(text))
        # The form stays: drivers parse such values, and refuse other forms.
        hexadecimal = re.fullmatch(r"[0-9a-fA-F:.\-\s]*", text) is not None
        return "".join(
            _replace_character(c, byte, hexadecimal=hexadecimal)
            for c, byte in zip(text, stream, strict=True)
        )

    def _stream(self, text: str, size: int) -> bytes:
        found = b""
        while len(found) < size:
            # The same value in other letters or with blanks has the same replacement.
            block = f"{len(found)}:{text.strip().lower()}".encode()
            found += hmac.digest(self.salt, block, hashlib.sha256)
        return found[:size]

    def _content(self, path: str, content: bytes | None) -> bytes | None:
        """Return the content of a file without unique values, None if it has none."""
        if content is None:
            return None
        _, _, name = path.rpartition("/")
        if name in UNIQUE:
            # Bytes without a text, such as VPD, are unique as a whole.
            text = content.decode("latin-1")
            stripped = text.strip()
            return text.replace(stripped, self.value(stripped)).encode("latin-1")
        try:
            text = content.decode()
        except UnicodeDecodeError:
            return content
        if _MOUNTS.fullmatch(path):
            text = "".join(self._mount(line) for line in text.splitlines())
        return self._text(text).encode()

    def _text(self, text: str) -> str:
        text = _UUID.sub(lambda m: self.value(m[0]), text)
        return _MAC.sub(lambda m: m[0] if m[0].lower() in _NO_MAC else self.value(m[0]), text)

    def _mount(self, line: str) -> str:
        """Return a line of mountinfo with the device, a hidden mount point, and no options."""
        fields, _, source = line.partition(" - ")
        try:
            mount_id, parent_id, numbers, _root, point, *_ = fields.split()
            kind, device, *_ = source.split()
        except ValueError:
            return ""  # a malformed line has fewer columns
        # These three are the same on all hosts, so that they identify none.
        if point not in ("/", "/boot", "/boot/efi"):
            point = f"/mnt/{self._stream(point, 6).hex()}"
        name = device if device.startswith("/dev/") else "none"
        return f"{mount_id} {parent_id} {numbers} / {point} rw - {kind} {name} rw\n"


def _replace_character(character: str, byte: int, *, hexadecimal: bool) -> str:
    if character.isascii() and character.isdigit():
        return str(byte % 10)
    if character.isascii() and character.isalpha():
        letters = "abcdef" if hexadecimal else "abcdefghijklmnopqrstuvwxyz"
        letter = letters[byte % len(letters)]
        return letter.upper() if character.isupper() else letter
    return character if ord(character) < 128 else "?"


def count_files(folders: Mapping[str, Folder]) -> int:
    """Return the number of files with a known content."""
    return sum(1 for f in folders.values() for c in f.files.values() if c is not None)
