"""The packages, of which one lies beside the others; the rest is in pyproject.toml.

Nothing is compiled here. The sources in csrc/ travel along, for ``python -m ds_sp_overlap build`` and for
``"kernels": "compiled"``, which build them at first use.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["ds_sp_overlap*"]), "ds_sp_overlap.csrc"],
    package_dir={"ds_sp_overlap.csrc": "csrc"},
    package_data={"ds_sp_overlap": ["py.typed"], "ds_sp_overlap.csrc": ["*.h", "*.cpp", "*.cu"]},
)
