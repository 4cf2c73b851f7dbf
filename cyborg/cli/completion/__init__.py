# SPDX-License-Identifier: Apache-2.0
"""``cyborg complete``: scripts that complete commands, options and values in a shell."""
