# SPDX-License-Identifier: Apache-2.0
"""What several backends have together."""

from dataclasses import replace

from cyborg.agent.backend import MAX_ERROR, View
from cyborg.agent.inventory import collect
from cyborg.core import wire
from cyborg.core.device import AttachHandle, HandleType
from cyborg.core.report import BackendState, BackendStatus, Report
from cyborg.fixtures.drivers import card

A, B = "0000:01:00.0", "0000:02:00.0"


def view(name: str, *addresses: str, status: BackendStatus = BackendStatus.READY) -> View:
    return View(BackendState(name, "puppet", status), tuple(card(a, name) for a in addresses))


def test_no_backends_have_nothing_and_say_so() -> None:
    nothing = collect([])
    assert (nothing.states, nothing.devices) == ((), ())
    assert nothing.digest == wire.digest([], [])


def test_while_all_are_looking_there_is_nothing_to_say() -> None:
    looking = view("b0", status=BackendStatus.DISCOVERING)
    assert collect([looking]).digest is None
    assert collect([looking, view("b1", A)]).digest is not None
    assert collect([looking, view("b1", status=BackendStatus.ERROR)]).digest is not None


def test_the_first_of_two_that_see_the_same_has_it() -> None:
    both = collect([view("b0", A), view("b1", A, B)])
    assert [(d.address, d.backend) for d in both.devices] == [(A, "b0"), (B, "b1")]
    assert both.states[0].error is None
    assert both.states[1].error == f"{A} is left out: backend b0 has it already"
    assert both.states[1].status is BackendStatus.READY


def test_parts_of_one_address_too() -> None:
    other = View(
        BackendState("b1", "puppet", BackendStatus.READY),
        (card("0000:09:00.0", "b1"), card(B, "b1")),
    )
    same_part = card("0000:09:00.0").deployables
    first = View(
        BackendState("b0", "puppet", BackendStatus.READY),
        (replace(card(A, "b0"), deployables=same_part),),
    )
    both = collect([first, other])
    assert [d.address for d in both.devices] == [A, B]
    Report("h", "e", 1, str(both.digest), both.states, both.devices)


def test_a_function_is_given_away_once() -> None:
    """Else a driver that lies could give an instance what another backend gave to its own."""
    function = AttachHandle(A, HandleType.PCI)
    views = [
        View(
            BackendState(name, "puppet", BackendStatus.READY),
            (card(at, name, handles=(function,)),),
        )
        for name, at in (("b0", B), ("b1", "0000:09:00.0"))
    ]
    both = collect([*views, view("b2", A)])
    assert [(d.address, d.backend) for d in both.devices] == [(B, "b0")]
    assert both.states[1].error == "0000:09:00.0 is left out: backend b0 has it already"
    assert both.states[2].error == f"{A} is left out: backend b0 has it already"


def test_what_is_said_has_an_end() -> None:
    many = [f"0000:{n:02x}:00.0" for n in range(100)]
    both = collect([view("b0", *many), view("b1", *many)])
    assert len(str(both.states[1].error)) == MAX_ERROR


def test_the_digest_follows_devices_and_states() -> None:
    seen = {
        collect([view("b0", A)]).digest,
        collect([view("b0", A, B)]).digest,
        collect([view("b0", A, status=BackendStatus.ERROR)]).digest,
        collect([view("b1", A)]).digest,
    }
    assert len(seen) == 4
    assert collect([view("b0", A)]).digest in seen
