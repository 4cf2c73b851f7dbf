# SPDX-License-Identifier: Apache-2.0
"""Start without eventlet, which no process of this package uses.

oslo.service requires eventlet, so it is installed. oslo.messaging imports futurist, which imports
eventlet if it is installed. This import takes a third of the CPU time of a daemon's start.
"""

import sys


def hide_eventlet() -> None:
    """Make ``import eventlet`` raise ImportError in this process, unless it is imported already.

    futurist 3.5.0 and the other libraries that support eventlet then use threads.
    """
    sys.modules.setdefault("eventlet", None)  # type: ignore[arg-type]  # None: not found
