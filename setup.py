"""Metadata of the distribution; tool settings live in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="verl-server",
    version="0.1.0",
    description="The rollout engine for RL post-training: SGLang in its own process, driven from every trainer rank",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["reinforcement learning", "language models", "rollout", "SGLang", "weight synchronization", "agents"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=find_packages(include=["verl_server", "verl_server.*"]),
    package_data={"verl_server": ["py.typed"]},
    install_requires=[
        "sglang>=0.5.15,<=0.5.23",
        "torch",
        "transformers",
        "aiohttp>=3.10",
        "numpy",
        "orjson",
        "prometheus-client",
        "psutil",
        "pydantic",
        "requests",
        "uvloop",
        "rich",
        "typer",
        "matplotlib",
        "tensordict",
        "mcp",
        "renderers",
    ],
    extras_require={
        "ray": ["ray>=2.40"],
        "docs": ["mkdocs-material", "mkdocstrings[python]"],
        "dev": [
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "mypy",
            "hypothesis",
            "types-psutil",
            "types-requests",
            "sglang-router",
        ],
    },
    entry_points={
        "console_scripts": ["verl-server = verl_server.cli:main"],
        "sglang.srt.platforms": ["verl_server_cpu = verl_server.platforms:activate"],
        "sglang.srt.plugins": ["verl_server_cpu = verl_server.platforms:register_hooks"],
    },
)
