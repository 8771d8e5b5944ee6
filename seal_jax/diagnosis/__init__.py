"""Ψ: a label for every turn of a verdict, and the profile of labels that drives both sides of the loop."""

from seal_jax.diagnosis.profile import Counts, Profile, count
from seal_jax.diagnosis.release import RELEASE_TAGS, TAG_TO_LABEL, release_labels
from seal_jax.diagnosis.rules import diagnose

__all__ = ["RELEASE_TAGS", "TAG_TO_LABEL", "Counts", "Profile", "count", "diagnose", "release_labels"]
