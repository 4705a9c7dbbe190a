"""Puts the quickstart's configuration into what is built; all else stands in pyproject.toml."""

from pathlib import Path
from shutil import copyfile

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithQuickstart(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            copyfile("configs/quickstart.toml", Path(self.build_lib, "april/cli/quickstart.toml"))


setup(cmdclass={"build_py": BuildWithQuickstart})
