# SPDX-License-Identifier: Apache-2.0
"""Comparison of the partitions of a fabric with the device sets that are in use."""

from collections.abc import Iterator

from cyborg.core.audit.sources import DeployableRecord, Finding, HostSnapshot, Kind, Repair
from cyborg.core.inventory.activations import HandleUse, PartitionUse, find_use
from cyborg.core.inventory.device_set import Activation


def compare_activation(
    snapshot: HostSnapshot, record: DeployableRecord, activation: Activation
) -> Iterator[Finding]:
    """Yield a finding if a partition is active without a user, or inactive under settled ARQs.

    The users of a partition are the handles that were claimed through the set and are not clean
    yet.
    """
    used_handles = snapshot.database.used_handles
    users = [handle for handle in used_handles if handle.set_provider == record.provider]
    subject = f"partition {record.address}"
    if activation is Activation.INACTIVE:
        settled = {arq.uuid for arq in snapshot.database.arqs if arq.is_settled(snapshot.now)}
        if users and settled.issuperset(handle.owner for handle in users):
            text = f"hardware: inactive; database: {len(users)} ARQs are bound to the set"
            yield snapshot.finding(Kind.PARTITION_INACTIVE, subject, text, provider=record.provider)
    elif not users:
        activator = "the agent" if activation is Activation.OWN else "another program"
        text = f"hardware: {activator} activated it; database: no ARQ has it, no job cleans it"
        # No repair of a partition that another program uses, or with a device that a server has.
        uses = [HandleUse(handle.id, handle.set_provider) for handle in used_handles]
        use = find_use(record.provider, record.members, uses)
        is_safe = activation is Activation.OWN and use is PartitionUse.UNUSED
        yield snapshot.finding(
            Kind.PARTITION_UNUSED,
            subject,
            text,
            Repair.DEACTIVATE if is_safe else None,
            provider=record.provider,
        )
