# SPDX-License-Identifier: Apache-2.0
"""Import of a database of OpenStack Cyborg."""
