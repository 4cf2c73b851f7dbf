# SPDX-License-Identifier: Apache-2.0
"""Memory of Placement, in this process, of having written its traits and resource classes."""


def reset() -> None:
    """Let Placement write its traits and resource classes to the database that it opens next."""
    # A late import: Placement is an optional dependency and slow to import.
    from placement.objects import resource_class, trait

    trait._TRAITS_SYNCED = False
    resource_class._RESOURCE_CLASSES_SYNCED = False
