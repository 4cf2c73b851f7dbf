# SPDX-License-Identifier: Apache-2.0
import setuptools
from setuptools.command.build_py import build_py


class BuildPy(build_py):
    """Leave cyborg/tests out of wheels: pbr lists all packages and all files below ``cyborg``."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if not self.editable_mode:
            self.packages = [
                name for name in self.packages if not f"{name}.".startswith("cyborg.tests.")
            ]

    def find_data_files(self, package: str, src_dir: str) -> list[str]:
        files = super().find_data_files(package, src_dir)
        return [name for name in files if not name.startswith("cyborg/tests/")]


class Distribution(setuptools.Distribution):
    """Build with BuildPy: pbr replaces ``cmdclass``, so it cannot be given there."""

    def get_command_class(self, command: str) -> type[setuptools.Command]:
        return BuildPy if command == "build_py" else super().get_command_class(command)


setuptools.setup(setup_requires=["pbr>=6.1.1"], pbr=True, distclass=Distribution)
