# SPDX-License-Identifier: Apache-2.0
"""Idempotency keys, by which conductors recognise copies of one RPC call.

oslo.messaging publishes a call again when its connection fails before the broker has confirmed it,
so that two conductors may each receive a copy. Each call has a random id, which its copies share.
Two equal calls that a caller makes on purpose have different ids, even in one REST request.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

MAX_ID = 64
"""Characters of a call id."""


def make_key(
    call_id: str, request_id: str | None, method: str, arguments: Mapping[str, Any]
) -> str:
    """Return the key of a call, 64 characters: equal for the copies of one call only.

    ``arguments`` are plain values.
    """
    # Arguments are included: an id used twice by mistake must not get another call's answer.
    body = json.dumps([call_id, request_id, method, arguments], sort_keys=True)
    return hashlib.sha256(body.encode()).hexdigest()
