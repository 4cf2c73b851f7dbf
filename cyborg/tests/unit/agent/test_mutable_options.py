# SPDX-License-Identifier: Apache-2.0
"""The documentation lists the options that an agent takes over at SIGHUP."""

from pathlib import Path

import pytest
from oslo_config import cfg
from oslo_log import log

import cyborg.conf

PAGE = Path(__file__).parents[4] / "doc" / "source" / "admin" / "services.rst"


@pytest.mark.static
def test_mutable_options_of_agent_are_documented() -> None:
    conf = cfg.ConfigOpts()
    cyborg.conf.register(conf, cyborg.conf.AGENT_GROUPS)
    log.register_options(conf)
    groups = [conf._opts, *(group._opts for group in conf._groups.values())]
    mutable = {name for group in groups for name, option in group.items() if option["opt"].mutable}
    row = PAGE.read_text().partition("* - ``cyborg-agent``")[2].partition("* - ``cyborg-api``")[0]
    assert mutable == {"debug", "log_config_append"}
    assert all(f"``{name}``" in row for name in mutable)
