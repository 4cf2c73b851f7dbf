# SPDX-License-Identifier: Apache-2.0
"""How the release notes are built."""

extensions = ["openstackdocstheme", "reno.sphinxext"]

project = "Cyborg Release Notes"
copyright = "the Cyborg founders"
release = version = ""
root_doc = "index"

html_theme = "openstackdocs"
html_static_path: list[str] = []
openstackdocs_projects: list[str] = []
openstackdocs_auto_version = False
openstackdocs_auto_name = False
html_last_updated_fmt = None
