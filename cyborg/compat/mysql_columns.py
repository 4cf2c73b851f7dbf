# SPDX-License-Identifier: Apache-2.0
"""Cache of the column descriptions that PyMySQL parses."""

import functools
from typing import Any

MAX_COLUMNS = 4096
"""Number of column descriptions that are kept; the statements of a service have some hundreds."""


def cache_column_descriptions() -> None:
    """Let PyMySQL parse equal descriptions of columns once in this process. Idempotent.

    The server describes each column of each answer, with the names of its table and of its
    database: more bytes than most rows have. The object of a parsed description never changes.
    """
    # A late import: other databases need no PyMySQL.
    from pymysql import connections

    module: Any = connections
    if not hasattr(module.FieldDescriptorPacket, "cache_info"):
        module.FieldDescriptorPacket = functools.lru_cache(MAX_COLUMNS)(
            module.FieldDescriptorPacket
        )
