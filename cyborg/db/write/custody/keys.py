# SPDX-License-Identifier: Apache-2.0
"""The keys of ``[conductor] custody_key_file``, for the transactions of an engine."""

from pathlib import Path

import sqlalchemy as sa
from oslo_config import cfg

from cyborg.core.custody.keys import NO_KEYS, Keys, parse_keys
from cyborg.core.errors import Invalid, Misconfigured

_OPTION = "cyborg_custody_keys"


def load(conf: cfg.ConfigOpts) -> Keys:
    """Return the keys of the file, NO_KEYS without a file. Raise Misconfigured."""
    if not (name := conf.conductor.custody_key_file):
        return NO_KEYS
    try:
        return parse_keys(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, Invalid) as exc:
        raise Misconfigured(
            f"[conductor] custody_key_file: cannot read the keys of {name}: {exc}",
            option="[conductor] custody_key_file",
        ) from exc


def attach(engine: sa.Engine, keys: Keys) -> sa.Engine:
    """Return the engine, with the same connections, whose transactions sign with ``keys``."""
    return engine.execution_options(**{_OPTION: keys})


def keys_of(connection: sa.Connection) -> Keys:
    """Return the keys of the engine of a connection."""
    keys: Keys = connection.get_execution_options().get(_OPTION, NO_KEYS)
    return keys
