"""The embedded environment: small stateful tool domains, a seeded task generator and a teacher for warm starts."""

from seal_jax.envs.toolbox.suite import TaskStore, ToolboxSuite

__all__ = ["TaskStore", "ToolboxSuite"]
