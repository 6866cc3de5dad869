"""Ranks: how they are launched, meet, agree and lock a run's directory."""
