# SPDX-License-Identifier: Apache-2.0
"""``cyborg``: the command-line client."""

import sys

from cyborg.cli import app


def main() -> int:
    """Run the client; return its exit code."""
    return app.main()


if __name__ == "__main__":
    sys.exit(main())
