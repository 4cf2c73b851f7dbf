# SPDX-License-Identifier: Apache-2.0
"""The fpga driver: cards with reconfigurable regions, and the images that it loads into them."""
