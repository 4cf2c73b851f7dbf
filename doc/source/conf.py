# SPDX-License-Identifier: Apache-2.0
"""How the documentation is built: sphinx-build -W doc/source doc/build/html."""

import os
from importlib import metadata

extensions = [
    "openstackdocstheme",
    "oslo_config.sphinxext",
    "oslo_config.sphinxconfiggen",
    "oslo_policy.sphinxext",
    "oslo_policy.sphinxpolicygen",
    "cliff.sphinxext",
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
html_static_path: list[str] = []
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
