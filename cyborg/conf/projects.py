# SPDX-License-Identifier: Apache-2.0
"""Sections about projects: quota, attachments and device_contexts."""

from oslo_config import cfg

from cyborg.conf.sections import Section

NONE, STATIC, UNIFIED = "none", "static", "unified"
QUOTA = Section(
    "quota",
    cfg.StrOpt(
        "driver",
        default=NONE,
        choices=[
            (NONE, "no limits"),
            (STATIC, "the limits of default_limits and project_limits"),
            (
                UNIFIED,
                "the registered limits and project limits of keystone; needs the extra 'limits' "
                "and the section [oslo_limit]",
            ),
        ],
        help="Source of the limits of the units of each resource class that the accelerator "
        "requests of one project may have. Requests that exceed a limit are rejected with 403. "
        "All conductors need the same value. [conductor] max_project_arqs applies in any case.",
    ),
    cfg.DictOpt(
        "default_limits",
        default={},
        sample_default="FPGA:8,CUSTOM_QAT:16",
        help="Limit of units for each project, by resource class. -1 is unlimited; a resource "
        "class that is not in the list is unlimited, too. With driver = unified, a limit applies "
        "to resource classes that have no registered limit in keystone.",
    ),
    cfg.ListOpt(
        "project_limits",
        default=[],
        sample_default="5f3a7c0b9a0e4b46a0d5c2a6cf0f2a11:FPGA:32",
        help="Limits of single projects, each as PROJECT_ID:RESOURCE_CLASS:UNITS, which replace "
        "those of default_limits. -1 is unlimited. Not used with driver = unified.",
    ),
    cfg.FloatOpt(
        "cache_time",
        default=60.0,
        min=0.0,
        help="Seconds for which a conductor uses the limits that it has read from keystone, with "
        "driver = unified. A changed limit has an effect after this time at the latest.",
    ),
    # While keystone is down, old limits are better than none: without them nobody could create
    # anything.
    cfg.FloatOpt(
        "max_cache_age",
        default=3600.0,
        min=0.0,
        help="Maximum age in seconds of the limits that a conductor uses while keystone does not "
        "answer, with driver = unified. Requests of a project whose limits are older, or were "
        "never read, are rejected with 503. Values below cache_time have the effect of "
        "cache_time.",
    ),
)

ATTACHMENTS = Section(
    "attachments",
    cfg.IntOpt(
        "max_per_project",
        default=1000,
        min=-1,
        help="Maximum number of attachments of one project, in any state; further ones are "
        "rejected with 403, also if an administrator requests them. Their accelerator requests "
        "also count for the limits of [quota]. Concurrent calls cannot exceed the limit. -1 "
        "disables the limit.",
    ),
)

DEVICE_CONTEXTS = Section(
    "device_contexts",
    cfg.FloatOpt(
        "unbound_ttl",
        default=86400.0,
        min=0.0,
        help="Seconds after which the conductors delete a device context that was never bound, "
        "with its accelerator requests and its hidden device profile, one day by default. The time "
        "begins when the context is created, and again when its accelerator requests are "
        "requested for a server or its lease ends without a bind; its project can "
        "set another time of expiry. A changed value is used for the next of these events. 0 means "
        "that contexts do not expire.",
    ),
    cfg.IntOpt(
        "lease_ttl",
        default=600,
        min=1,
        help="Seconds for which pre_bind reserves the handles of a device context, unless the call "
        "has lease_seconds; at most max_lease.",
    ),
    cfg.IntOpt(
        "max_lease",
        default=3600,
        min=1,
        help="Maximum of lease_seconds in a call of pre_bind. A lease can be renewed before it "
        "ends, any number of times.",
    ),
    cfg.IntOpt(
        "max_per_project",
        default=1000,
        min=-1,
        help="Maximum number of device contexts of one project, in any state; further ones are "
        "rejected with 403. Their accelerator requests also count for [conductor] "
        "max_project_arqs. Concurrent calls cannot exceed the limit. -1 disables the limit.",
    ),
)
