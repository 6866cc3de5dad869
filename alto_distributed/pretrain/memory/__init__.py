"""Bytes that a run needs."""
