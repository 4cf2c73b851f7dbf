# SPDX-License-Identifier: Apache-2.0
"""``cyborg``: the command-line client."""

import gc
import sys

from cyborg.compat.imports import defer_openstack, hide_osprofiler


def main() -> int:
    """Run the client; return its exit code."""
    # A third of the CPU time of a short command were collections: those while modules are imported,
    # whose objects stay, and those of the interpreter at its end, when the memory is freed anyway.
    gc.set_threshold(50_000)
    # Before the first import of keystoneauth1. Only here: programs that use the commands as a
    # library decide themselves what they import.
    hide_osprofiler()
    defer_openstack()
    try:
        from cyborg.cli import app

        return app.main()
    finally:
        gc.freeze()


if __name__ == "__main__":
    sys.exit(main())
