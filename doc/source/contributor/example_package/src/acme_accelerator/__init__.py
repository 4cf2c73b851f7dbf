# SPDX-License-Identifier: Apache-2.0
"""A driver package: copy it and replace the name."""
