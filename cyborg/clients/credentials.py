# SPDX-License-Identifier: Apache-2.0
"""Description of rejected credentials for error messages."""

from oslo_config import cfg

from cyborg.core.errors import Unavailable

_NAMES = ("username", "user_id", "application_credential_id", "application_credential_name")


def describe(conf: cfg.ConfigOpts, section: str) -> str:
    """Return the user and the configuration section, such as ``user 'cyborg' of [placement]``.

    Return only the section if the authentication plug-in has no user. Never return a password or
    token.
    """
    section = conf[section].auth_section or section
    for name in _NAMES:
        try:
            value = conf[section][name]
        except cfg.NoSuchOptError:  # registered only by a plug-in that has this option
            continue
        if value:
            kind = "user" if name.startswith("user") else "application credential"
            return f"{kind} {value!r} of [{section}]"
    return f"the credentials of [{section}]"


def credentials_error(by: str, credentials: str, detail: str) -> Unavailable:
    """Return the error for a 401; ``credentials`` is the result of ``describe``."""
    return Unavailable(
        f"{by} refused {credentials} (401): correct the user, the password or the project of this "
        f"section; {detail}",
        status=401,
    )
