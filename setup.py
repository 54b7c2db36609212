"""Say what a wheel holds beside the package: configurations and tools, which stand at the top of a checkout."""

from setuptools import find_packages, setup

BESIDE = {"spmd_rl.configs": "configs", "spmd_rl.tools": "tools"}

setup(
    packages=[*find_packages(include=["spmd_rl*"]), *BESIDE],
    package_dir=BESIDE,
    package_data={"spmd_rl.configs": ["**/*.yaml", "**/*.jinja", "**/*.json"]},
)
