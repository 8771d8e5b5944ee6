"""Packaging of seal_jax: what it needs, from which version to which, and why.

`pip install -e .` installs what training needs; the extras add an accelerator, GGUF reading or the tests. Python 3.11
resolves to jax 0.10 (the last jax that supports it), Python 3.12 and later to jax 0.12; the suite runs on both.
"""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

# A lower bound is the oldest release that was tried (all at their lowest at once on Python 3.11: checkpoint, data,
# telemetry and packaging tests; the rest of the suite was not run there); an
# upper bound is the first release line that nobody has run it with, set only where a project breaks its API from line
# to line (all 0.x projects here, and transformers).
INSTALL_REQUIRES = [
    # 0.10 is the newest jax for Python 3.11, 0.12 the newest for 3.12 and 3.13; each 0.x drops deprecated API.
    "jax>=0.10.0,<0.13",
    # flax 0.12 is the line built for jax 0.10 to 0.12; nnx's rules for module attributes changed with 0.12.
    "flax>=0.12.0,<0.13",
    "optax>=0.2.6,<0.3",  # 0.x; the oldest tested with jax 0.10
    # Restoring onto another device count under a global mesh has been broken more than once in earlier lines
    # (google/orbax 678, 2545, 3164); the checkpoint tests pin the behaviour for this one.
    "orbax-checkpoint>=0.12.0,<0.13",
    # transformers 5 dropped Flax models (ours are our own) and moved rope settings to `rope_parameters`.
    "transformers>=5.0,<6",
    "ml_collections>=1.0",  # the oldest tried
    "grain>=0.2.11,<0.3",  # 0.x; MapDataset.shuffle/repeat and iterators with get_state/set_state
    "safetensors>=0.6",  # transformers 5 sets the real floor
    "tokenizers>=0.21",  # likewise: each transformers release pins the minor line it works with
    "numpy>=2.0",  # what jax 0.10 asks for; jax 0.12 asks for 2.2 itself
    "absl-py>=2.0",  # flags; ml_collections' config flags are built on it
    "rich>=13.0",  # the live display was tried with 13.0 and 15.0
    "matplotlib>=3.9",  # the first line with wheels built for numpy 2
    "jinja2>=3.1",  # what transformers asks for to render a chat template
    "mpmath==1.3.0",  # BFCL's math tool returns mpf values as text, so the version counts (bfcl-eval's pin)
    "tensorboardX>=2.6.2",  # writes event files without TensorFlow; the oldest tried
    "jsonschema>=4.18",  # the study's records (experiments/) are checked with it; the oldest tried
]

GGUF = ["gguf>=0.17"]  # the oldest that was installed with the other lowest bounds
EXTRAS_REQUIRE = {
    "tpu": ["jax[tpu]"],  # brings libtpu; the range is the one above
    "cuda": ["jax[cuda12]"],  # CUDA 12 drivers; every jax of the range offers it
    "cuda13": ["jax[cuda13]"],  # CUDA 13 drivers; likewise
    "gguf": GGUF,
    "test": [
        "pytest>=8.0",
        "ruff>=0.17,<0.18",  # formatting differs between ruff lines: a wider range breaks CI on the day of a release
        "mypy>=2.0,<3",  # a new major release turns new checks on
        "nbformat>=5.9",  # this and the next two run the Colab notebook in a test
        "nbclient>=0.10",
        "ipykernel>=6.29",
        *GGUF,
    ],
}

setup(
    name="seal-jax",
    version="0.1.0",
    description="SEAL in JAX and Flax: tool-use agents trained in a loop of rollouts, failure diagnosis, an evolving "
    "interface and a reweighted policy gradient (arXiv 2605.24426)",
    long_description=(ROOT / "README.md").read_text("utf-8") if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",  # jax 0.10, the oldest jax of our range, needs it
    packages=find_packages(include=["seal_jax", "seal_jax.*"]),
    package_data={"seal_jax": ["py.typed"]},
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    entry_points={"console_scripts": ["seal-jax = seal_jax.main:run"]},
    classifiers=[
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
