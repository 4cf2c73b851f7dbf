# SPDX-License-Identifier: Apache-2.0
"""``cyborg.wsgi.api:application``: the API for any WSGI server.

The configuration is read when the server loads this module. Only environment variables select its
files: sys.argv is the command line of the server and is ignored.

::

    OS_CYBORG_CONFIG_FILES    configuration files, separated by semicolons
    OS_CYBORG_CONFIG_DIR      the directory of the files that are given by a relative path. If no
                              files are given, cyborg.conf in this directory is read; if it does
                              not exist, all files *.conf in this directory

If neither variable is set, oslo.config finds the files in ~/.cyborg and /etc/cyborg.
"""

import os

from cyborg.wsgi.application import config_arguments, make_application

application = make_application(config_arguments(os.environ))
