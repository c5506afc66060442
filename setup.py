"""The packages, of which one lies beside the others, and the description; the rest is in pyproject.toml.

Nothing is compiled here. The sources in csrc/ travel along, for ``python -m ds_sp_overlap build`` and for
``"kernels": "compiled"``, which build them at first use.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup


def description():
    """Return the README without the links into this repository, which lead nowhere on an index page."""
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"<!--.*?-->\n", "", text)
    text = re.sub(r"!\[[^]]*\]\((?!https:)[^)]*\)\n", "", text)
    return re.sub(r"\[([^]]*)\]\((?!https:)[^)]*\)", r"\1", text)


setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    packages=[*find_packages(include=["ds_sp_overlap*"]), "ds_sp_overlap.csrc"],
    package_dir={"ds_sp_overlap.csrc": "csrc"},
    package_data={"ds_sp_overlap": ["py.typed"], "ds_sp_overlap.csrc": ["*.h", "*.cpp", "*.cu"]},
)
