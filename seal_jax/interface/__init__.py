"""Ω: what the training-time interface adds to the bare observation, and how it follows the profile."""

from seal_jax.interface.evolve import evolve
from seal_jax.interface.interface import BARE, Interface, full, initial
from seal_jax.interface.settings import InterfaceSettings

__all__ = ["BARE", "Interface", "InterfaceSettings", "evolve", "full", "initial"]
