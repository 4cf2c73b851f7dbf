# SPDX-License-Identifier: Apache-2.0
"""Garbage collection in daemons."""

import gc

# Python's default is 700. References are counted, so that the search only finds cycles, of which a
# call of this service makes few.
# New objects, beyond those freed meanwhile, after which the youngest are searched for cycles.
THRESHOLD = 10_000


def exclude_startup_objects() -> None:
    """Exclude the present objects from all later garbage collections.

    A daemon calls this once in each process when it is ready.
    """
    # The modules of a daemon have more than 150 000 objects, which stay: each full collection would
    # visit them all, for 0.05 s and more in the middle of a call.
    gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD)
