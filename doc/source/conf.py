# SPDX-License-Identifier: Apache-2.0
"""How the documentation is built: sphinx-build -W doc/source doc/build/html."""

import os
import sys
from importlib import metadata

from docutils import nodes
from sphinx.application import Sphinx

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "_ext"))

extensions = [
    "openstackdocstheme",
    "oslo_config.sphinxext",
    "oslo_config.sphinxconfiggen",
    "oslo_policy.sphinxext",
    "oslo_policy.sphinxpolicygen",
    "cliff.sphinxext",
    "api_reference",
    "life_cycles",
    "rpc_reference",
]

project = "Cyborg"
copyright = "the Cyborg founders"
author = "the Cyborg founders"
release = version = metadata.version("cyborg")

root_doc = "index"
exclude_patterns = ["_generated"]
highlight_language = "none"
nitpicky = True
suppress_warnings: list[str] = []

html_theme = "openstackdocs"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
openstackdocs_projects: list[str] = []
# Ours is the installed version; the theme would ask git, which a tarball does not have.
openstackdocs_auto_version = False
openstackdocs_auto_name = False
openstackdocs_use_storyboard = False
html_last_updated_fmt = None

_here = os.path.dirname(os.path.abspath(__file__))
_config = os.path.join(_here, "..", "..", "tools", "config")
config_generator_config_file = [
    (os.path.join(_config, "cyborg-config-generator.conf"), "_generated/cyborg"),
]
policy_generator_config_file = os.path.join(_config, "cyborg-policy-generator.conf")
sample_policy_basename = "_generated/cyborg"

autoprogram_cliff_application = "cyborg"

_PROGRAMS = {
    "cyborg": "manage the accelerators of an OpenStack cloud",
    "cyborg-agent": "discover and prepare the accelerators of a host",
    "cyborg-api": "serve the REST API of the accelerator service",
    "cyborg-capture": "write the devices of a host to a file",
    "cyborg-conductor": "own the database of the accelerator service",
    "cyborg-dbsync": "create, upgrade and clean the database of the accelerator service",
    "cyborg-quickstart": "bind and release accelerators of this machine, without configuration",
    "cyborg-standalone": "run the accelerator service in one process",
    "cyborg-status": "check the accelerator service before and after an upgrade",
}
man_pages = [
    (f"cli/{program}", program, description, [author], 1)
    for program, description in _PROGRAMS.items()
]


def remove_internal_links(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Keep only the text of links to other pages: a man page would show "<>" after it."""
    if app.builder.format == "man":
        for link in list(doctree.findall(nodes.reference)):
            if not link.get("refuri"):
                link.replace_self(link.children)


def setup(app: Sphinx) -> None:
    """Register the functions of this file."""
    app.connect("doctree-resolved", remove_internal_links)
