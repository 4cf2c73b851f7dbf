# SPDX-License-Identifier: Apache-2.0
"""``cyborg describe``: one object with everything about it."""
