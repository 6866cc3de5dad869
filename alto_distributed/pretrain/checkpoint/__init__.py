"""Checkpoints of a run: written whole or not at all, checked before they are loaded."""
