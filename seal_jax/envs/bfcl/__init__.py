"""BFCL multi-turn (V3 benchmark, as shipped in bfcl-eval 2026.3.23): 800 real tasks over eight tool classes.

Data and tool classes are read from the installed package; nothing of it is copied here, and none of its executor is
used. `make_suite("bfcl")` builds the suite.
"""

from seal_jax.envs.base import register_suite
from seal_jax.envs.bfcl.suite import BfclSuite

register_suite("bfcl")(BfclSuite)

__all__ = ["BfclSuite"]
