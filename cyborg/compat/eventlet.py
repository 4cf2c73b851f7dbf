# SPDX-License-Identifier: Apache-2.0
"""Start without eventlet, which no process of this package uses.

oslo.service requires it, and futurist, which oslo.messaging imports, imports it wherever it is
installed: a third of the CPU time that a daemon takes to start.
"""

import sys


def hide() -> None:
    """Make ``import eventlet`` raise ImportError in this process, unless it is imported already.

    futurist 3.5.0 and the other libraries that know eventlet then use threads, as without it.
    """
    sys.modules.setdefault("eventlet", None)  # type: ignore[arg-type]  # None: not found
