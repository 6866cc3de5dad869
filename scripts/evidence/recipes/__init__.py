"""The study that decides the recommended settings: rates of vectors, rules for embeddings, presets, peers, wrong norms.

    python -m scripts.evidence.recipes run [--seconds N] [--nice N]
    python -m scripts.evidence.recipes status

Every finished run is one line of ``results/recipes.jsonl`` and never runs again, so that a study may stop at any time
and go on later. :mod:`.queue` holds the order of runs; what decides the defaults comes first.
"""
