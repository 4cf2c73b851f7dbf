# SPDX-License-Identifier: Apache-2.0
"""The options of the fake driver."""

from cyborg.core.drivers.options import Option
from cyborg.drivers import managed

MAX_DEVICES = 4096
MAX_HANDLES = 256  # a PCI bus has 32 devices of 8 functions

OPTIONS = (
    Option("num_devices", "int", 1, f"Number of cards, up to {MAX_DEVICES}."),
    Option("num_handles", "int", 16, f"Number of handles of each card, up to {MAX_HANDLES}."),
    Option(
        "address",
        "str",
        "0000:0c:00.0",
        "PCI address of the first card; each further card is on the next bus. Two backends of "
        "one host need cards at different addresses.",
    ),
    *managed.OPTIONS,
    Option(
        "setup",
        "str",
        "none",
        "Result of setting up the host: ok, fail or hang; none means that no setup is needed.",
    ),
    Option(
        "fail", "str", "", "Error message of every discovery; empty means that discoveries succeed."
    ),
    Option("hang", "float", 0.0, "Duration of every discovery in seconds."),
    Option(
        "prepare",
        "str",
        "none",
        "Result of preparing a handle for an instance: ok, fail or hang; none means that handles "
        "need no preparation.",
    ),
    Option("prepare_seconds", "float", 0.0, "Duration of preparing a handle in seconds."),
    Option("releasing", "str", "ok", "Result of releasing a handle: ok, fail or hang."),
    Option(
        "sanitise",
        "str",
        "none",
        "Result of wiping a handle after an instance released it: ok, fail or hang; none means "
        "that handles are not wiped.",
    ),
    Option(
        "program",
        "str",
        "ok",
        "Result of loading an image: ok, fail or hang. The card reports the image until the agent "
        "stops or the backend changes.",
    ),
    Option(
        "fetch_images",
        "bool",
        False,
        "Whether to fetch each image that is loaded, and those that device profiles request by "
        "accel:bitstream_id or accel:function_id, from the image service. Their data are not used.",
    ),
    Option(
        "gate",
        "str",
        "",
        "Path of a file. A hanging call succeeds as soon as the file exists; without this option "
        "it hangs forever.",
        host_only=True,
    ),
    Option(
        "sick",
        "str",
        "",
        "Path of a file that lists the unhealthy cards, one per line: the address, or * for all, "
        "a space and the reason. All other cards are healthy. Without this option no health is "
        "measured.",
        host_only=True,
    ),
    Option(
        "absent",
        "str",
        "",
        "Path of a file that lists the addresses of absent cards, one per line. It is read at "
        "each discovery.",
        host_only=True,
    ),
    Option(
        "divided",
        "str",
        "",
        "Path of a file that stores the number of handles of each partitioned card, one address "
        "and number per line. Without this option cards cannot be partitioned.",
        host_only=True,
    ),
    Option(
        "journal",
        "str",
        "",
        "Path of a file to which the driver appends a line of JSON at the start of each setup and "
        "each prepare, release, sanitise and program call, and after each fetched image.",
        host_only=True,
    ),
)
