"""The embedded environment: small stateful tool domains, a seeded task generator and a teacher for warm starts."""

from seal_jax.envs.toolbox.play import corpus, play, statistics, transcript
from seal_jax.envs.toolbox.suite import TaskStore, ToolboxSuite
from seal_jax.envs.toolbox.teacher import NO_HABITS, Demo, Habits, Reply, Teacher, View, demonstrations

__all__ = [
    "NO_HABITS",
    "Demo",
    "Habits",
    "Reply",
    "TaskStore",
    "Teacher",
    "ToolboxSuite",
    "View",
    "corpus",
    "demonstrations",
    "play",
    "statistics",
    "transcript",
]
