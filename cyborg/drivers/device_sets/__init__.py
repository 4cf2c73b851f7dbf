# SPDX-License-Identifier: Apache-2.0
"""Sources of device sets: they group the devices of other backends of the host."""
