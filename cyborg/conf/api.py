# SPDX-License-Identifier: Apache-2.0
"""The section of the API."""

from oslo_config import cfg

from cyborg.conf.sections import Section

API = Section(
    "api",
    cfg.HostAddressOpt(
        "host_ip",
        default="127.0.0.1",
        help="The address on which cyborg-api listens. A reverse proxy on the same host is the "
        "usual client; other WSGI servers have their own options.",
    ),
    cfg.PortOpt("port", default=6666, help="The port on which cyborg-api listens."),
    cfg.IntOpt(
        "workers",
        default=2,
        min=1,
        deprecated_name="api_workers",
        help="Number of worker processes of cyborg-api.",
    ),
    cfg.IntOpt("threads", default=8, min=1, help="Number of threads of each worker of cyborg-api."),
    cfg.StrOpt(
        "public_endpoint",
        help="The base URL of links in responses. Set it if clients must use another URL than "
        "the host and path of their request.",
    ),
    cfg.IntOpt(
        "max_limit",
        default=1000,
        min=1,
        help="Maximum number of rows in one response of a collection; a link leads to the next "
        "rows. The accelerator requests of one instance are returned completely unless the "
        "client sends a limit.",
    ),
    cfg.IntOpt(
        "max_body_size", default=1048576, min=1024, help="Maximum size of a request body in bytes."
    ),
    cfg.FloatOpt(
        "database_timeout",
        default=3.0,
        min=0.5,
        help="Seconds to wait for the next byte of the database's response before the API "
        "answers 503. The limit for a new connection is two thirds of it. MariaDB and "
        "PostgreSQL cancel a statement at nine tenths of it. These parameters of [database] "
        "connection take precedence: read_timeout, write_timeout and connect_timeout "
        "(MySQL, MariaDB), tcp_user_timeout, keepalives_* and options (PostgreSQL).",
    ),
    # A page on the Internet could make a browser on this host send requests to a service on
    # loopback, by a name of its own that resolves to 127.0.0.1.
    cfg.ListOpt(
        "server_names",
        default=[],
        help="With auth_strategy = noauth: host names, without a port, under which clients reach "
        "the API in addition to localhost and loopback addresses. A request with another "
        "name in its Host header, or with an Origin header of another site, is rejected, "
        "because a web page could have sent it.",
    ),
    cfg.BoolOpt(
        "console",
        default=False,
        help="Serve the web console at /ui, and the sign-in of its users: it forwards user name "
        "and password to keystone. Without it, these paths do not exist. cyborg-standalone "
        "serves the console unless this is set to false.",
    ),
    cfg.StrOpt(
        "audit_map_file",
        help="The file that maps the requests to the actions and targets of CADF events, such as "
        "/etc/cyborg/api_audit_map.conf. With it, the audit middleware of keystonemiddleware sends "
        "two events for each request, as [oslo_messaging_notifications] describes. Without it, "
        "there are no events.",
    ),
    cfg.ListOpt(
        "audit_ignored_methods",
        default=["GET", "HEAD"],
        help="The HTTP methods of requests without CADF events.",
    ),
    cfg.FloatOpt(
        "body_timeout",
        default=30.0,
        min=1.0,
        help="Maximum seconds to receive a request body. Applies only to gunicorn: other servers "
        "have their own options, such as socket-timeout of uWSGI.",
    ),
    cfg.PortOpt(
        "metrics_port",
        default=0,
        help="The port on which the API serves Prometheus metrics at /metrics, over HTTP and "
        "without authentication, under any WSGI server. 0 disables it. Of several workers on a "
        "host, one serves the metrics of all. The stand-alone service ignores it: [conductor] "
        "metrics_port serves these metrics too.",
    ),
    cfg.HostAddressOpt(
        "metrics_listen",
        default="127.0.0.1",
        help="The address on which the API serves Prometheus metrics.",
    ),
    cfg.StrOpt(
        "metrics_directory",
        default="$state_path/metrics/api",
        help="The directory in which the workers of the API keep their metrics if metrics_port is "
        "set. It is created with mode 0700; the user of the workers must be able to do so. Each "
        "worker has a file of 128 KiB, which is merged and deleted after its end. Without a "
        "directory, the values are those of one worker.",
    ),
)
