# SPDX-License-Identifier: Apache-2.0
"""The options of the fake driver."""

from cyborg.core.option import Option
from cyborg.drivers import managed

MAX_DEVICES = 4096
MAX_HANDLES = 256  # a PCI bus has 32 devices of 8 functions

OPTIONS = (
    Option("num_devices", "int", 1, f"How many cards there are, up to {MAX_DEVICES}."),
    Option("num_handles", "int", 16, f"How many handles each card has, up to {MAX_HANDLES}."),
    Option(
        "address",
        "str",
        "0000:0c:00.0",
        "Where the first card stands; each other has the next bus. Two backends of one host "
        "need cards at different addresses.",
    ),
    *managed.OPTIONS,
    Option(
        "setup",
        "str",
        "none",
        "What getting the host ready comes to: ok, fail or hang; with none there is nothing to do.",
    ),
    Option("fail", "str", "", "If not empty, every discovery fails with this message."),
    Option("hang", "float", 0.0, "Seconds that every discovery takes."),
    Option(
        "prepare",
        "str",
        "none",
        "What preparing a handle for an instance comes to: ok, fail or hang; with none the "
        "handles need not be prepared.",
    ),
    Option("prepare_seconds", "float", 0.0, "Seconds that preparing a handle takes."),
    Option("releasing", "str", "ok", "What releasing a handle comes to: ok, fail or hang."),
    Option(
        "sanitise",
        "str",
        "none",
        "What wiping a handle after its instance comes to: ok, fail or hang; with none nothing "
        "is wiped.",
    ),
    Option(
        "program",
        "str",
        "ok",
        "What loading an image comes to: ok, fail or hang. The card shows the image until the "
        "agent ends or the backend is changed.",
    ),
    Option(
        "gate",
        "str",
        "",
        "The path of a file: what hangs goes on, and is ok, once it is there. Without one it "
        "hangs for ever.",
    ),
    Option(
        "sick",
        "str",
        "",
        "The path of a file that names the cards which are sick, one a line: the address, or * "
        "for all, and after a space the reason. What it does not name is well. Without this "
        "option no health is measured.",
    ),
    Option(
        "absent",
        "str",
        "",
        "The path of a file that names the cards which are not there, an address a line. It is "
        "read at each discovery.",
    ),
    Option(
        "divided",
        "str",
        "",
        "The path of a file that keeps into how many handles cards were divided, an address "
        "and a number a line. Without this option they cannot be divided.",
    ),
    Option(
        "journal",
        "str",
        "",
        "The path of a file that gets a line of JSON for each handle prepared, released or "
        "wiped, each deployable programmed and each setup, when that begins.",
    ),
)
