"""Puts the quickstart's configurations into what is built; all else stands in pyproject.toml."""

from pathlib import Path
from shutil import copyfile

from setuptools import setup
from setuptools.command.build_py import build_py

CONFIGURATIONS = ("quickstart.toml", "quickstart-sft.toml")


class BuildWithQuickstart(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            built_in = Path(self.build_lib, "april/configs")
            built_in.mkdir(parents=True, exist_ok=True)
            for name in CONFIGURATIONS:
                copyfile(Path("configs", name), built_in / name)


setup(cmdclass={"build_py": BuildWithQuickstart})
