# SPDX-License-Identifier: Apache-2.0
"""Run the commands of pages that show no output, on a replayed host with two QAT cards.

The pages are those of PREPARATIONS; their blocks name this test in ``.. run-by:``.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cyborg.testing import captures
from cyborg.tests.fixtures.machine.forked_commands import forked_commands
from cyborg.tests.fixtures.machine.processes import BIN, Daemon, ini, wait_until
from cyborg.tests.fixtures.machine.shell import shell
from cyborg.tests.fixtures.pages.console_blocks import DOC, read_blocks

TEST = "cyborg/tests/functional/test_page_commands.py"
PREPARATIONS = {
    "admin/drivers": "DEVICE=$(cyborg device-list --vendor 8086 -f value -c UUID | head -n 1)",
    "admin/explanations": "cyborg device-profile-create fpga --group resources:FPGA=1",
    "admin/gpu_clouds": "true",
    "admin/liveness": "true",
    "admin/rollouts": "true",
    "admin/services": "true",
    "admin/views": "true",
    "cli/cyborg": "mkdir -p ~/.zfunc ~/.config/fish/completions",
    "install/packaging": "DESTDIR=$PWD/package; mkdir -p $DESTDIR/usr/share/"
    "{bash-completion/completions,zsh/vendor-completions,fish/vendor_completions.d}",
}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "DEFAULT": {"host": "compute-1"},
    "agent": {"enabled_backends": "gpus,qat", "replay": captures.FOLDER / "qat-4xxx.jsonl"},
    "conductor": {"hello_interval": 0.5, "publish_interval": 0.5, "jobs_interval": 0.5},
    "gpus": {"driver": "generic", "devices": "vendor=10de,class=0302"},
    "qat": {"driver": "crypto", "devices": "vendor=8086"},
}


@pytest.mark.matrix
def test_commands_of_pages_succeed(tmp_path: Path) -> None:
    (tmp_path / "cyborg.conf").write_text(ini(SETTINGS))
    command = [
        *(BIN / "cyborg-standalone", "--config-file", tmp_path / "cyborg.conf"),
        *("--state-dir", tmp_path / "state", "--port", "0", "--placement-port", "0"),
    ]
    service = Daemon("standalone", command, tmp_path, {})
    service.start()
    try:
        said = r"ready: .*--os-endpoint (\S+)"
        (endpoint,) = wait_until("it is ready", lambda: re.findall(said, service.tail(100)))
        with forked_commands() as commands:
            path = f"{commands}:{BIN}:{os.environ['PATH']}"
            env = {"PATH": path, "HOME": str(tmp_path), "LANG": "C.UTF-8"}
            env |= {"OS_AUTH_TYPE": "none", "OS_ENDPOINT": endpoint}
            with shell(tmp_path, env) as session:
                assert session.run("cyborg discover-services --wait")[1] == 0
                for page, preparation in PREPARATIONS.items():
                    text = (DOC / f"{page}.rst").read_text(encoding="utf-8")
                    blocks = [b for b in read_blocks(page, text) if b.mark == TEST]
                    assert blocks, page
                    for line in [preparation, *(c for block in blocks for c in block.commands)]:
                        output, status = session.run(line)
                        assert status == 0, f"{page}: {line}\n{output}"
    finally:
        service.stop()
