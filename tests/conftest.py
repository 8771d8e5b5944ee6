"""Before jax is imported: eight CPU devices, so that sharding is tested anywhere, and quick compiles instead of fast
code. And what several files share.
"""

from __future__ import annotations

import os

import pytest

from seal_jax.envs.base import make_suite  # imports no jax

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# the suite is bound by compiling many small functions once; flags that are set already are kept
for _flag in ("--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"):
    if _flag.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}".strip()


@pytest.fixture(scope="session")
def suite():
    """BFCL as configured by default, read once. (Tests of another suite have a fixture of that name of their own.)"""
    pytest.importorskip("bfcl_eval")
    return make_suite("bfcl")


@pytest.fixture(scope="session")
def quirky():
    """BFCL with the accidents of the official executor."""
    pytest.importorskip("bfcl_eval")
    return make_suite("bfcl", official_quirks=True)
