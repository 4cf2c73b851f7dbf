# SPDX-License-Identifier: Apache-2.0
"""The section of the conductor."""

from oslo_config import cfg

from cyborg.conf.sections import Section
from cyborg.core.inventory.reference_names import RELEASES

CONDUCTOR = Section(
    "conductor",
    cfg.IntOpt("workers", default=1, min=1, help="Number of conductor processes."),
    cfg.FloatOpt(
        "hello_interval",
        default=10.0,
        min=0.1,
        help="Seconds between two heartbeats of a daemon, at least. The conductors give agents a "
        "longer interval if there are so many that their heartbeats would use more than half a "
        "core of each conductor process.",
    ),
    cfg.FloatOpt(
        "max_hello_interval",
        default=30.0,
        min=0.1,
        help="Seconds between two heartbeats of an agent, at most, whatever the number of agents. "
        "An agent is late or down after a number of missed heartbeats, so this also limits the "
        "time after which it is down. hello_interval takes precedence if it is longer.",
    ),
    # One missed heartbeat is normal: a conductor that restarts may lose it.
    cfg.IntOpt(
        "late_heartbeats",
        default=2,
        min=1,
        help="Number of missed heartbeats after which a service is late.",
    ),
    cfg.IntOpt(
        "down_heartbeats",
        default=6,
        min=2,
        help="Number of missed heartbeats after which a service is down.",
    ),
    # 75 s: an agent needs up to twice the heartbeat of its broker connection to notice that this is
    # dead, and reconnects within some seconds.
    cfg.FloatOpt(
        "broker_reconnect_grace",
        default=75.0,
        min=0.0,
        help="Extra seconds to wait after an outage of the message broker before agents are "
        "marked down, for the agents to reconnect. A conductor marks agents down only after "
        "it has received its own heartbeats over the broker without interruption for the "
        "down time of a service plus this time.",
    ),
    cfg.FloatOpt(
        "database_timeout",
        default=10.0,
        min=2.0,
        help="Seconds to wait for the next byte of the database's response before the connection "
        "counts as lost and the transaction fails. If a new connection gets no response "
        "either, this takes 4 seconds only. A statement waits for a row lock for half of this time "
        "and is then retried. The database cancels a statement at nine tenths of this time, "
        "and a transaction that is idle for one and a half times as long, but at least 15 seconds. "
        "The same parameters of [database] connection as for [api] database_timeout take "
        "precedence. cyborg-dbsync has no such limits.",
    ),
    # Short, because a request that hangs delays the other providers of its host; a repetition is
    # cheap, as each write is checked by a generation.
    cfg.FloatOpt(
        "publish_timeout",
        default=4.0,
        min=0.1,
        help="Seconds for one request to Placement that publishes inventories and traits, unless "
        "[placement] request_timeout is shorter. After a request without a response the "
        "conductor checks whether Placement is reachable, and repeats the request in the "
        "next round: after an outage of Placement a change is published within about twice "
        "this time.",
    ),
    # Not the way of a change, which wakes the publisher: this is for what failed or was left over.
    cfg.FloatOpt(
        "publish_interval",
        default=5.0,
        min=0.1,
        help="Seconds between two searches for resource providers that are stale in Placement. A "
        "report is published at once; this interval applies to failed requests and to the "
        "work of a stopped conductor.",
    ),
    cfg.FloatOpt(
        "placement_verify_interval",
        default=600.0,
        min=1.0,
        help="Seconds in which every resource provider is compared with Placement once, at any "
        "number of providers. Any difference in Placement is repaired. A host costs one call "
        "to Placement, and two more for each provider that has changed there, also by "
        "allocations. If the calls take longer than this time, a warning is logged.",
    ),
    cfg.IntOpt(
        "max_placement_calls",
        default=4,
        min=1,
        help="Maximum number of concurrent calls to Placement of one conductor process for each of "
        "three purposes: publishing resource providers, of which one call writes to each host; "
        "their verification; and orphan scans. The conductors share the first two.",
    ),
    cfg.FloatOpt(
        "compute_node_interval",
        default=30.0,
        min=0.0,
        help="Seconds between two queries for the compute nodes in Placement. If the compute "
        "node of a host is missing, new or recreated, the host's providers are verified at "
        "once instead of after placement_verify_interval. 0 disables the queries.",
    ),
    cfg.FloatOpt(
        "outbox_interval",
        default=5.0,
        min=0.1,
        help="Seconds between two searches for messages whose delivery failed.",
    ),
    # Longer than the slowest transaction and the stop of a process: a lease that ends under work in
    # progress makes two conductors repeat each other's calls.
    cfg.FloatOpt(
        "lease_timeout",
        default=60.0,
        min=1.0,
        help="Lease time in seconds: after it another conductor may take over the work of a "
        "stopped conductor.",
    ),
    # More than the 5 minutes that nova-compute waits: later the event is of no use to anybody.
    cfg.IntOpt(
        "outbox_attempts",
        default=30,
        min=1,
        help="Number of delivery attempts before a message of the outbox becomes a dead letter. "
        "With 30, an event is tried for more than 6 minutes, of which nova-compute waits "
        "for 5, and a notification for more than 100 minutes.",
    ),
    # Long enough for an operator who looks once a month: each is a message that somebody lacks.
    cfg.FloatOpt(
        "dead_letter_ttl",
        default=2592000.0,
        min=1.0,
        help="Seconds for which dead letters are kept, 30 days by default.",
    ),
    cfg.FloatOpt(
        "jobs_interval",
        default=5.0,
        min=0.1,
        help="Seconds between two searches for host work whose agent must be queried. New work "
        "starts at once; this interval applies to lost calls and to the work of a stopped "
        "conductor.",
    ),
    cfg.FloatOpt(
        "driver_timeout",
        default=150.0,
        min=1.0,
        help="Seconds for an agent to enable, change or remove a backend, including setup and "
        "first discovery. After this time the change counts as failed and is rolled back. "
        "Must be more than twice [agent] discovery_timeout plus one hello_interval.",
    ),
    cfg.FloatOpt(
        "prepare_timeout",
        default=240.0,
        min=1.0,
        help="Seconds for a host to prepare the devices of an instance. After this time the bind "
        "is undone and Nova gets a failure event. Nova waits 300 s by default.",
    ),
    cfg.FloatOpt(
        "drain_timeout",
        default=86400.0,
        min=1.0,
        help="Seconds for which a device that gets another layout waits for the release of its "
        "bound handles, if the request asked for that. After this time the device is "
        "uncordoned with its old layout.",
    ),
    cfg.FloatOpt(
        "release_timeout",
        default=600.0,
        min=1.0,
        help="Seconds for a host to clean the handle of an accelerator request that was unbound. "
        "After this time the request is UnbindFailed until the handle is clean, and the "
        "handle is reserved in Placement. The cleaning is retried without end.",
    ),
    cfg.FloatOpt(
        "max_maintenance",
        default=2592000.0,
        min=1.0,
        help="Maximum length of a maintenance window of a device in seconds, 30 days by default. "
        "A window can be extended before it ends, any number of times.",
    ),
    cfg.FloatOpt(
        "attachment_timeout",
        default=900.0,
        min=1.0,
        help="Seconds for attaching accelerators to an existing instance, including a reboot that "
        "was requested with it. After this time an attachment that is not complete is undone. "
        "A detach has no limit.",
    ),
    cfg.FloatOpt(
        "program_timeout",
        default=1800.0,
        min=1.0,
        help="Seconds for a host to load an image into a device. A change of the layout has no "
        "limit.",
    ),
    cfg.IntOpt(
        "device_cordon_after",
        default=3,
        min=0,
        help="Number of prepare jobs of a device that fail in a row, after which it has the state "
        "failing: it accepts no new requests, and its units are reserved in Placement. A job for "
        "a profile with accel: keys is not counted, because the profile can be the cause. 0 "
        "disables this.",
    ),
    cfg.FloatOpt(
        "cordon_grace",
        default=600.0,
        min=0.0,
        help="Seconds after a cordon, such as by cyborg device-disable, a maintenance window or "
        "the change of a driver or layout, in which a server still gets a device that Placement "
        "had allocated to it before: Nova would otherwise set it to ERROR. 0 refuses such servers.",
    ),
    cfg.FloatOpt(
        "device_cordon_time",
        default=600.0,
        min=1.0,
        help="Seconds for which a failing device is cordoned. Then it is tried again: the next "
        "failure cordons it again, a success ends this. cyborg device-enable uncordons it at once.",
    ),
    cfg.FloatOpt(
        "orphan_scan_interval",
        default=300.0,
        min=0.0,
        help="Seconds between two orphan scans, which compare every bound request with "
        "Placement's allocations. The conductors take turns. 0 disables the scans.",
    ),
    cfg.FloatOpt(
        "orphan_grace",
        min=0.0,
        sample_default=600.0,
        help="Grace period in seconds for a bound request without an allocation in Placement. "
        "After it the request is unbound, or deleted if Nova has no such server, and its device "
        "is released. Nova deletes allocations and requests one after the other, so a request "
        "without an allocation is not always an orphan. A bind that finds no free handle of its "
        "provider does not wait for this time: it deletes a request at once if its instance has "
        "no allocation and Nova has no such server. 0 reports orphans and frees none. If unset, "
        "the value is 600; with [nova] send_events = false, orphan scans are disabled, because "
        "without Nova nothing creates allocations.",
    ),
    cfg.FloatOpt(
        "unbound_ttl",
        default=86400.0,
        min=0.0,
        help="Seconds after which an unchanged request without a handle is deleted, one day by "
        "default. This applies to requests that are Initial or Unbound, for example because "
        "their creator stopped before the bind, and to BindFailed requests whose instance "
        "no longer exists in Nova. Nova binds new requests directly and creates new ones "
        "for an unshelved or evacuated server, so it needs no old requests. The value must "
        "be longer than the scheduling of a server may take. 0 disables the deletion.",
    ),
    cfg.FloatOpt(
        "dropped_ttl",
        default=300.0,
        min=0.0,
        help="Seconds after which an unchanged request without a handle is deleted while Nova "
        "builds no server of its project. Nova binds a request within seconds of its creation; one "
        "that it has dropped blocks the deletion of its device profile. Increase this to bind "
        "requests by hand. 0 leaves them to unbound_ttl.",
    ),
    cfg.IntOpt(
        "max_project_arqs",
        default=1000,
        min=-1,
        help="Maximum number of accelerator requests of one project, in any state; further ones "
        "are rejected with 403. Calls at the same moment can exceed the limit if they create more "
        "than 512 requests. A request without a project does not count. -1 disables the limit.",
    ),
    cfg.StrOpt(
        "reference_traits",
        default="none",
        choices=[
            ("none", "The names of this service only."),
            *((str(n), f"Also those of OpenStack Cyborg {n}.") for n in RELEASES),
        ],
        help="Release of OpenStack Cyborg whose traits devices have in addition, so that device "
        "profiles of a migrated cloud still find them. Its resource class replaces that of this "
        "service where it was another: CUSTOM_QAT of Intel C62x (CUSTOM_CRYPTO), and CUSTOM_SSD of "
        "Inspur drives (CUSTOM_NVME). After a change, each agent reports its devices again. Set "
        "the same value for all conductors.",
    ),
    cfg.FloatOpt(
        "tombstone_ttl",
        default=2592000.0,
        min=0.0,
        help="Seconds for which the tombstone of a removed device is kept, 30 days by default. A "
        "device that returns to the same address within this time keeps its uuid, the status that "
        "an operator set, and an operator's attributes; if it was removed before it was cleaned, "
        "it is cleaned first. 0 keeps no tombstones: such a device is then offered "
        "without cleaning if it returns.",
    ),
    # A host in repair returns within weeks, and must find the row of its agent.
    cfg.FloatOpt(
        "service_ttl",
        default=2592000.0,
        min=0.0,
        help="Seconds after its last heartbeat at which a service is deleted, 30 days by default, "
        "so that hosts that are gone leave no rows. The desired state of the drivers of an agent "
        "is deleted with it. An agent whose host has devices is never deleted by age; cyborg "
        "service-delete deletes it. 0 disables this.",
    ),
    cfg.FloatOpt(
        "custody_seal_interval",
        default=5.0,
        min=0.1,
        help="Seconds between two searches for new custody records, which are then added to the "
        "hash chain of their device.",
    ),
    cfg.StrOpt(
        "custody_key_file",
        help="File with the keys that sign what conductors write into custody logs: one key in "
        "hexadecimal in each line, of which the first signs and all check. All conductors need "
        "the same keys. Without this file, changes are found that do not compute the hashes of a "
        "chain again.",
    ),
    cfg.IntOpt(
        "custody_retention",
        default=400,
        min=0,
        max=36500,
        help="Days for which custody records are kept, also of devices that were removed. The "
        "hash of the last deleted record is kept, so that the rest can be checked. 0 keeps them "
        "for ever.",
    ),
    cfg.PortOpt(
        "metrics_port",
        default=0,
        help="The port on which the conductor serves Prometheus metrics at /metrics, over HTTP "
        "and without authentication. 0 disables it. Of several workers on a host, one serves "
        "the metrics of all.",
    ),
    cfg.HostAddressOpt(
        "metrics_listen",
        default="127.0.0.1",
        help="The address on which the conductor serves Prometheus metrics.",
    ),
    cfg.StrOpt(
        "metrics_directory",
        default="$state_path/metrics/conductor",
        help="The directory in which the conductors of this host keep their own metrics, such as "
        "binds by outcome, if metrics_port is set. It is created with mode 0700. Each worker has a "
        "file of 128 KiB, which is merged and deleted after its end. Without a directory, the "
        "values are those of one worker.",
    ),
    # After an outage all agents report at once. Memory is the limit, not time.
    cfg.IntOpt(
        "max_concurrent_reports",
        default=4,
        min=1,
        help="Maximum number of host reports that one conductor process records at the same "
        "time, at most one per host. Further reports are rejected before they are parsed, "
        "and their agents retry. Recording a report needs about ten times its size in "
        "memory.",
    ),
    cfg.IntOpt(
        "max_report_bytes",
        default=16777216,
        min=65536,
        help="Maximum size of a host report in bytes.",
    ),
)


def reference_release(conf: cfg.ConfigOpts) -> int | None:
    """Return the release whose names are published in addition, None for none."""
    value: str = conf.conductor.reference_traits
    return None if value == "none" else int(value)
