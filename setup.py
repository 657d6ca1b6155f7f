"""Metadata of the distribution; tool settings live in pyproject.toml.

`VERL_SERVER_REPOSITORY_URL`, set by whoever publishes a release, is the page of the repository on the web. The links of
the long description then lead there. Without it they are plain text, because relative links lead nowhere on an index.
"""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

FOLDER = Path(__file__).parent
REPOSITORY_URL = os.environ.get("VERL_SERVER_REPOSITORY_URL", "").rstrip("/")
RELATIVE_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")


def read_version() -> str:
    """The version that the package itself has."""
    found = re.search(r'^__version__ = "(.+)"$', (FOLDER / "verl_server/__init__.py").read_text("utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


def read_description() -> str:
    """README.md with links that work on the page of a package index."""

    def absolute(link: re.Match[str]) -> str:
        mark, text, target = link.groups()
        if not REPOSITORY_URL:
            return "" if mark else text
        return f"{mark}[{text}]({REPOSITORY_URL}/{'raw' if mark else 'blob'}/main/{target})"

    return RELATIVE_LINK.sub(absolute, (FOLDER / "README.md").read_text("utf-8"))


setup(
    name="verl-server",
    version=read_version(),
    description="The rollout engine for RL post-training: SGLang or vLLM servers, driven from every trainer rank",
    long_description=read_description(),
    long_description_content_type="text/markdown",
    author="The authors of verl_server",
    project_urls={"Source": REPOSITORY_URL, "Documentation": f"{REPOSITORY_URL}/tree/main/docs"}
    if REPOSITORY_URL
    else {},
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=[
        "reinforcement learning",
        "language models",
        "rollout",
        "SGLang",
        "vLLM",
        "weight synchronization",
        "agents",
    ],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=find_packages(include=["verl_server", "verl_server.*"]),
    package_data={
        "verl_server": ["py.typed"],
        "verl_server.trajectory.view": ["page.html.jinja"],
        "verl_server.gateway.http": ["live.html"],
    },
    # What a trainer, an agent, a router and a gateway need. The server needs the extra `sglang` in its own environment.
    install_requires=[
        "torch>=2.11",
        "transformers>=5.10",
        "aiohttp>=3.12",
        "httpx>=0.28",  # renderers imports it without a requirement
        "fastapi>=0.115",
        "uvicorn>=0.34",
        "httptools>=0.6.4",
        "msgspec>=0.19",
        "numpy>=2.1",
        "orjson>=3.10",
        "pillow>=11",
        "prometheus-client>=0.21",
        "psutil>=6.1",
        "pydantic>=2.11",
        "requests>=2.32",
        "uvloop>=0.21",
        "rich>=13.9",
        "jinja2>=3.1.6",
        "typing-extensions>=4.12",
        "typer>=0.15",
        "matplotlib>=3.10",
        "tensordict>=0.10",
        "mcp>=2",
        "renderers>=0.1.12",
        "opentelemetry-api>=1.30",
        "xxhash>=3.5",
        "zstandard>=0.23",
        "packaging>=24.2",
        "safetensors>=0.5",
    ],
    extras_require={
        "sglang": ["sglang>=0.5.15,<=0.5.23"],
        "vllm": ["vllm>=0.32,<0.34"],
        "docker": ["docker>=7.1"],
        "ray": ["ray>=2.40"],
        # What examples/grpo.py can use beside an engine.
        "training": ["gguf>=0.17", "peft>=0.19", "tensorboard>=2.19", "wandb>=0.19"],
        "docs": ["mkdocs-material>=9.6", "mkdocstrings[python]>=0.29"],
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
            "openai",
            "anthropic",
            "httpx",
            "schemathesis",
            "opentelemetry-sdk",
            "docker",
        ],
    },
    entry_points={
        "console_scripts": ["verl-server = verl_server.cli.app:main"],
        "sglang.srt.platforms": ["verl_server_cpu = verl_server.platforms:activate"],
        "sglang.srt.plugins": ["verl_server_cpu = verl_server.platforms:register_hooks"],
        "vllm.general_plugins": ["verl_server = verl_server.vllm_plugin:register"],
        "verl.plugins": ["verl_server = verl_server.integrations.verl.plugin"],
    },
)
