# SPDX-License-Identifier: Apache-2.0
"""All commands by task, and the help screen that shows them."""
