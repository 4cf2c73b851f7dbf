# SPDX-License-Identifier: Apache-2.0
"""``cyborg``: the command-line client."""

import sys

from cyborg.compat import client_imports


def main() -> int:
    """Run the client; return its exit code."""
    # Before the first import of keystoneauth1. Only here: programs that use the commands as a
    # library decide themselves what they import.
    client_imports.hide_osprofiler()
    client_imports.defer_openstack()
    from cyborg.cli import app

    return app.main()


if __name__ == "__main__":
    sys.exit(main())
