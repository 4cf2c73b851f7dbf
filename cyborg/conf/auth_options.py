# SPDX-License-Identifier: Apache-2.0
"""Check the credentials, TLS files and URLs of a section before its first request."""

import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from keystoneauth1 import exceptions as ks
from keystoneauth1 import loading
from oslo_config import cfg

from cyborg.core.errors import Misconfigured


def load_auth(conf: cfg.ConfigOpts, section: str) -> Any:
    """Return the authentication plug-in of a section, None if auth_type is not set.

    Raise Misconfigured if an option of the section, or of its auth_section, is unusable.
    """
    options = conf[section]
    try:
        if options.auth_section is not None:
            loading.register_auth_conf_options(conf, options.auth_section)
        auth = loading.load_auth_from_conf_options(conf, section)
    except (ks.ClientException, cfg.Error, TypeError, ValueError) as exc:
        raise _error(options.auth_section or section, "auth_type", str(exc)) from exc
    # keystoneauth and requests read the files and URLs at the first request only, and then raise an
    # OSError or a ValueError that names no option.
    _check_files(options, section)
    check_url(section, "endpoint_override", getattr(options, "endpoint_override", None))
    check_url(options.auth_section or section, "auth_url", getattr(auth, "auth_url", None))
    return auth


def _check_files(options: cfg.ConfigOpts.GroupAttr, section: str) -> None:
    """Raise Misconfigured for a TLS file that cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if options.cafile and not options.insecure:
        path = Path(options.cafile)
        try:
            if path.is_dir():
                context.load_verify_locations(capath=path)
            else:
                context.load_verify_locations(path)
        except OSError as exc:
            expected = "a readable file or folder of PEM certificates"
            raise _file_error(section, "cafile", path, exc, expected) from exc
    if options.keyfile and not options.certfile:
        raise _error(section, "keyfile", "set, but certfile is not: set certfile, or no keyfile")
    if not options.certfile:
        return
    for name in ("certfile", "keyfile"):
        # Without keyfile, OpenSSL looks for the key in certfile.
        path = Path(options[name] or options.certfile)
        try:
            path.read_bytes()
        except OSError as exc:
            expected = "a readable file in PEM format"
            raise _file_error(section, name, path, exc, expected) from exc
    try:
        # Without a password, OpenSSL would ask for that of an encrypted key at the terminal.
        context.load_cert_chain(options.certfile, options.keyfile, password="")
    except OSError as exc:
        expected = "a certificate and its key, which is not encrypted, in certfile and keyfile"
        raise _file_error(section, "certfile", path, exc, expected) from exc


def check_url(section: str, option: str, url: str | None) -> None:
    """Raise Misconfigured if a URL is set that is not of HTTP; an empty one counts as not set."""
    if not url:
        return
    try:
        parts = urlsplit(url)
        usable = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise _error(section, option, f"{url!r}: expected a URL such as https://controller/service")


def _file_error(
    section: str, option: str, path: Path, exc: OSError, expected: str
) -> Misconfigured:
    return _error(section, option, f"{path}: {exc.strerror or exc}: expected {expected}")


def _error(section: str, option: str, problem: str) -> Misconfigured:
    return Misconfigured(f"[{section}] {option}: {problem}", option=f"{section}.{option}")
