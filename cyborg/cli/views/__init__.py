# SPDX-License-Identifier: Apache-2.0
"""Views of the cloud in a terminal: ``cyborg top`` and ``cyborg topology``."""
