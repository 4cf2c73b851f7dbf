# SPDX-License-Identifier: Apache-2.0
"""Flags of Placement: has this process written the standard traits and resource classes?"""


def reset_sync_flags() -> None:
    """Clear the flags, so that Placement writes traits and classes to the next database too."""
    # A late import: Placement is an optional dependency and slow to import.
    from placement.objects import resource_class, trait

    trait._TRAITS_SYNCED = False
    resource_class._RESOURCE_CLASSES_SYNCED = False
