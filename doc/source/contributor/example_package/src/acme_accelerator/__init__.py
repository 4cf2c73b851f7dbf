# SPDX-License-Identifier: Apache-2.0
"""Example of a driver package: copy it and replace the name."""
