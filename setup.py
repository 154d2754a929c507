"""Packaging of sesa_jax. Settings of tools stand in pyproject.toml."""

import pathlib
import re

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent


def requirements() -> list[str]:
  """Returns the requirements of requirements.txt, without comments."""
  lines = (ROOT / "requirements.txt").read_text().splitlines()
  stripped = (line.split("#")[0].strip() for line in lines)
  return [line for line in stripped if line]


def version() -> str:
  """Returns the package's version, without importing the package."""
  text = (ROOT / "sesa_jax" / "__init__.py").read_text()
  return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)[1]


LIBTPU = "libtpu>=0.0.52"

setup(
  name="sesa_jax",
  version=version(),
  description="SESA, self-evolving search agents, in JAX",
  license="Apache-2.0",
  packages=find_packages(include=["sesa_jax", "sesa_jax.*"]),
  # "" is every package: skills, templates and tables that code reads.
  package_data={"": ["*.jsonl", "*.json", "*.jinja", "*.md", "*.txt"]},
  python_requires=">=3.11",
  install_requires=requirements(),
  extras_require={
    # Prints warnings and takes a lock file where there is no TPU: an extra.
    "tpu": [LIBTPU],
    "cuda12": ["jax[cuda12]"],
    # To compile for absent hardware: a TPU pod, 8 x A100.
    "plan": [
      LIBTPU,
      "jax-cuda12-plugin",
      "jax-cuda12-pjrt",
      "nvidia-cuda-nvcc-cu12",
      "nvidia-cudnn-cu12",
    ],
    "dev": [
      "beartype>=0.23",
      "hypothesis>=6.170",
      "pytest>=9.2",
      "pytest-timeout>=2.4",
      "ruff>=0.17",
      "torch>=2.13",  # the other side of parity tests alone
    ],
  },
)
