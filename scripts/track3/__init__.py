"""ALTO's presets on the optimization track of modded-nanogpt: see README.md beside this file."""
