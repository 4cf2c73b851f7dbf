# SPDX-License-Identifier: Apache-2.0
"""Read a database of OpenStack Cyborg, and write what an import takes from it."""
