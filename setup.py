"""Puts conf/ into the wheel, as trime/conf; all else about the package is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfiguration(build_py):
    """Copies the configuration files beside the modules; a development install reads them where they are."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "trime", "conf")
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree("conf", target)


setup(cmdclass={"build_py": BuildWithConfiguration})
