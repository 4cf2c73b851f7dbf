# SPDX-License-Identifier: Apache-2.0
"""No error of the command line shows a token or a password."""

import io

import pytest

from cyborg.cli import app
from cyborg.cli.common.usage import RedactedStream, find_secrets

SECRET = "gAAAAABl-S3cret"
CALLS = (
    f"--service-token {SECRET} arq-list",
    f"--service-token={SECRET} arq-list",
    f"arq-list --service-token {SECRET}",
    f"arq-unbind --service-tokn {SECRET} an-arq --colour",
    f"arq-unbind an-arq --service-tokn={SECRET}",
    f"--os-token={SECRET}",
    f"--os-passwrd {SECRET} arq-list",
    f"arq-list --os-pasword={SECRET}",
    f"--os-auth-type token --os-token {SECRET} --os-endpoint http://127.0.0.1:1 arq-list",
    f"--os-auth-type none --os-endpoint http://127.0.0.1:1 arq-unbind {SECRET} --service-token "
    f"{SECRET}",
)


@pytest.mark.parametrize("call", CALLS)
def test_error_hides_secrets_of_the_command_line(
    call: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = app.main(call.split())
    except SystemExit as exc:
        code = exc.code
    output = capsys.readouterr()
    assert code not in (0, None)
    assert output.err + output.out
    assert SECRET not in output.err + output.out


def test_service_token_before_the_command_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["--service-token", SECRET, "arq-unbind", "an-arq"]) == 2
    message = "--service-token follows the command, as in: cyborg arq-unbind ARQ --service-token"
    assert message in capsys.readouterr().err


def test_find_secrets_selects_by_name() -> None:
    words = ["--os-token", "a", "--os-user=b", "--service-token=c", "--name", "d", "--os-password"]
    assert list(find_secrets(words)) == ["a", "c"]


def test_redacted_stream_replaces_whole_words() -> None:
    stream = io.StringIO()
    RedactedStream(stream, ["a", "a-b"]).write("a-b, 'a' and a-c, bad\n")
    assert stream.getvalue() == "***, '***' and a-c, bad\n"
