# SPDX-License-Identifier: Apache-2.0
"""The plugin of tempest for what cyborg-tempest-plugin does not test, such as device contexts.

Both can be installed together: this one has options and names of its own.
"""

from collections.abc import Sequence
from pathlib import Path

from oslo_config import cfg
from tempest.test_discover import plugins

GROUP = cfg.OptGroup("cyborg_extensions", title="Extensions of the accelerator service")
OPTIONS = (
    cfg.BoolOpt(
        "enabled",
        default=True,
        help="Whether the accelerator service of the cloud has these extensions. The tests are "
        "also skipped where [service_available] cyborg of cyborg-tempest-plugin is false.",
    ),
    cfg.StrOpt(
        "min_microversion",
        default="2.0",
        help="Lowest microversion that the tests request.",
    ),
    cfg.StrOpt(
        "max_microversion",
        default="latest",
        help="Highest microversion that the tests request. Tests of a higher one are skipped.",
    ),
)


class ExtensionsPlugin(plugins.TempestPlugin):
    """Tests of device contexts, attachments, device sets and microversions."""

    def load_tests(self) -> tuple[str, str]:
        """Return the folder of the tests, and the folder that contains the package ``cyborg``."""
        folder = Path(__file__).resolve().parent
        return str(folder / "api"), str(folder.parents[1])

    def register_opts(self, conf: cfg.ConfigOpts) -> None:
        """Register the options."""
        conf.register_group(GROUP)
        conf.register_opts(OPTIONS, GROUP)

    def get_opt_lists(self) -> list[tuple[str, Sequence[cfg.Opt]]]:
        """Return the options for the sample of a configuration."""
        return [(GROUP.name, OPTIONS)]
