"""Packaging. torch is no build requirement, and must be installed first: ``pip install --no-build-isolation .``"""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = re.search(r'__version__ = "(.+)"', (here / "ds_sp_overlap/__init__.py").read_text()).group(1)

transformers = ["transformers>=4.56", "accelerate>=1.12", "peft>=0.18"]
setup(
    name="ds_sp_overlap",
    version=version,
    description="Overlapped Ulysses sequence parallelism for DeepSpeed",
    long_description=(here / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["ds_sp_overlap*"]),
    python_requires=">=3.10",
    install_requires=["torch>=2.10", "deepspeed>=0.19.7", "packaging", "pydantic>=2", "tabulate"],
    extras_require={
        "flash": ["flash-attn>=2.6"],
        "transformers": transformers,
        "test": [*transformers, "pytest", "hypothesis", "numpy", "matplotlib", "tqdm"],
    },
)
