# SPDX-License-Identifier: Apache-2.0
"""Run the conformance kit: ``python -m cyborg.testing.conformance``."""

import sys

from cyborg.testing.conformance.command import main

sys.exit(main())
