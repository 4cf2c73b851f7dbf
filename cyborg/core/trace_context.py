# SPDX-License-Identifier: Apache-2.0
"""The context of a trace as text: the value of the header ``traceparent``, version 00.

``00-`` trace id, 32 hexadecimal digits; parent span id, 16; flags, 2. See
https://www.w3.org/TR/trace-context/. Clients, peers and stored rows provide it, so it is checked
before each use.
"""

import re
from typing import Any

LENGTH = 55
"""Characters of a trace context."""

MAX_TRACED_ATTEMPTS = 10
"""Attempts of a job or a message that its trace shows, so that no trace grows for ever."""

_PATTERN = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def parse_trace_context(value: Any) -> str | None:
    """Return a well-formed trace context, None for any other value."""
    is_valid = isinstance(value, str) and _PATTERN.fullmatch(value) is not None
    return value if is_valid else None
