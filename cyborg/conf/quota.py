# SPDX-License-Identifier: Apache-2.0
"""Options of the limits of projects."""

from typing import Any

from oslo_config import cfg

GROUP = "quota"
NONE, STATIC, UNIFIED = "none", "static", "unified"
OPTIONS = [
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
    cfg.FloatOpt(
        "max_cache_age",
        default=3600.0,
        min=0.0,
        help="Maximum age in seconds of the limits that a conductor uses while keystone does not "
        "answer, with driver = unified. Requests of a project whose limits are older, or were "
        "never read, are rejected with 503. Values below cache_time have the effect of "
        "cache_time.",
    ),
]


def register(conf: cfg.ConfigOpts) -> None:
    """Register the options of this section."""
    conf.register_opts(OPTIONS, group=GROUP)


def list_opts() -> list[tuple[str, list[Any]]]:
    """Return the options for the sample file and the documentation."""
    return [(GROUP, OPTIONS)]
