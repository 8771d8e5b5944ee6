"""The learner: trajectories to arrays, the loss, the update, the optimiser, the supervised warm start.

Imports stay explicit (`seal_jax.learner.update`, ...): this file loads nothing, so that host-side parts stay light.
"""
