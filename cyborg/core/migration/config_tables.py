# SPDX-License-Identifier: Apache-2.0
"""What becomes of each option of OpenStack Cyborg, releases 12 to 17.

The source of the facts is ``cyborg/conf`` of these releases, and the code that reads the options.
Libraries have their own options; those that the installed library knows are kept.
"""

from collections.abc import Mapping
from enum import StrEnum

# Sections of libraries that both services use.
LIBRARIES = frozenset(
    {
        *("keystone_authtoken", "oslo_messaging_kafka", "oslo_messaging_notifications"),
        *("oslo_messaging_rabbit", "oslo_middleware", "oslo_policy"),
        *("barbican", "key_manager"),  # of castellan
    }
)

# Sections of clients, whose options are mostly those of keystoneauth.
SERVICES = frozenset({"glance", "nova", "placement"})

# Options that newer releases of oslo.log do not have.
LOG_OPTIONS = frozenset({("DEFAULT", "use_eventlog"), ("DEFAULT", "watch_log_file")})


class Kind(StrEnum):
    """What the operator must know of an option."""

    CONVERTED = "converted"
    # Named with what to write instead; the services work without it.
    REPLACED = "replaced"
    NOT_NEEDED = "not needed"
    # A line that the operator must write, or check, to have what the former file had.
    BY_HAND = "by hand"


# Options with the same meaning under another name. Also deprecated names of the former service and
# its libraries: files often outlive them.
RENAMED: Mapping[tuple[str, str], tuple[str, str]] = {
    ("api", "api_workers"): ("api", "workers"),
    ("agent", "resource_provider_name"): ("agent", "resource_provider"),
    ("glance", "api_insecure"): ("glance", "insecure"),
    ("glance", "num_retries"): ("glance", "retries"),
    ("glance", "default_trusted_certificate_ids"): ("glance", "trusted_certificates"),
    ("nvme", "cleanup_timeout"): ("nvme", "erase_timeout"),
    ("DEFAULT", "conn_pool_min_size"): ("oslo_messaging_rabbit", "conn_pool_min_size"),
    ("DEFAULT", "conn_pool_ttl"): ("oslo_messaging_rabbit", "conn_pool_ttl"),
    ("DEFAULT", "rpc_conn_pool_size"): ("oslo_messaging_rabbit", "rpc_conn_pool_size"),
    ("keystone_authtoken", "auth_uri"): ("keystone_authtoken", "www_authenticate_uri"),
    ("DEFAULT", "sql_connection"): ("database", "connection"),
    ("database", "sql_connection"): ("database", "connection"),
}

_TLS = "a reverse proxy terminates TLS: see the installation guide"
_MEMORY = (
    "each process caches tokens in memory; for a shared cache install python-memcached, then write "
    "[keystone_authtoken] memcached_servers"
)
_QUOTA = "no release enforced it; write [quota] driver = static, and default_limits = CLASS:UNITS"
_UNREAD = "no release reads it"

# Not converted: the meaning differs, so that the operator must choose the value.
REPLACED: Mapping[tuple[str, str], str] = {
    ("DEFAULT", "bind_timeout"): "write [conductor] prepare_timeout",
    ("DEFAULT", "periodic_interval"): "write [agent] discovery_interval",
    ("DEFAULT", "quota_fpgas"): _QUOTA,
    ("DEFAULT", "quota_gpus"): _QUOTA,
    ("DEFAULT", "rpc_response_timeout"): "write [rpc] timeout",
    ("DEFAULT", "thread_pool_size"): "write [DEFAULT] executor_thread_pool_size",
    ("glance", "debug"): "write [DEFAULT] default_log_levels",
    ("keystone_authtoken", "memcached_servers"): _MEMORY,
    ("keystone_authtoken", "memcache_servers"): _MEMORY,
}
NOT_NEEDED: Mapping[tuple[str, str], str] = {
    ("DEFAULT", "backdoor_port"): "the services have no backdoor",
    ("DEFAULT", "backdoor_socket"): "the services have no backdoor",
    ("DEFAULT", "bindir"): "the services do not search their commands",
    ("DEFAULT", "fatal_exception_format_errors"): "it was for tests",
    ("DEFAULT", "pybasedir"): "the services do not search their package",
    ("DEFAULT", "run_external_periodic_tasks"): "the services have no such tasks",
    **{
        ("DEFAULT", name): "usage is counted from the accelerator requests"
        for name in ("max_age", "quota_driver", "reservation_expire", "until_refresh")
    },
    ("agent", "resource_provider_startup_retries"): (
        "the conductor repeats the search for the provider"
    ),
    ("api", "api_paste_config"): "the middleware of the API cannot be configured",
    ("database", "mysql_engine"): "the tables use InnoDB",
    ("glance", "enable_certificate_validation"): "certificates are always validated",
    ("nic_devices", "enabled_nic_types"): "the driver has one section, [nic]",
    ("oslo_messaging_rabbit", "use_queue_manager"): (
        "the permissions of the message broker are for queues of answers with random names"
    ),
    **{
        (section, name): _UNREAD
        for section in SERVICES
        for name in ("version", "min_version", "max_version")
    },
}
# Sections of which no option has a counterpart.
SECTIONS: Mapping[str, tuple[Kind, str]] = {
    "backend_defaults": (Kind.NOT_NEEDED, "the driver nvmf_spdk_driver has no counterpart"),
    "cors": (Kind.REPLACED, "let the reverse proxy send these headers"),
    "cyborg_sys_admin": (
        Kind.REPLACED,
        "write [cyborg_privileged]: see the installation guide",
    ),
    "keystone": (Kind.NOT_NEEDED, _UNREAD),
    "oslo_concurrency": (Kind.NOT_NEEDED, "the services use no lock files"),
    "oslo_messaging_amqp": (
        Kind.NOT_NEEDED,
        "oslo.messaging has no driver for AMQP 1.0 any more; the message broker is RabbitMQ",
    ),
    "oslo_reports": (Kind.NOT_NEEDED, "the services write no reports"),
    "profiler": (Kind.REPLACED, "write [tracing]"),
    "service_catalog": (Kind.NOT_NEEDED, _UNREAD),
    "service_user": (Kind.NOT_NEEDED, "the services send no tokens of users to other services"),
    "ssl": (Kind.REPLACED, _TLS),
}

TLS_OF_API = _TLS
