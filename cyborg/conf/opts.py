# SPDX-License-Identifier: Apache-2.0
"""The entry point of oslo.config.opts: every option of this project."""

import itertools
from typing import Any

from cyborg.conf import GROUPS


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return (section, options) pairs for oslo-config-generator and sphinx."""
    return list(itertools.chain.from_iterable(group.list_opts() for group in GROUPS))
