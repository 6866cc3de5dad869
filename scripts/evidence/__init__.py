"""Studies of what the paper claims, run with this code on what two cores and bundled data allow.

    python -m scripts.evidence STUDY [--quick] [--into DIR]
    python -m scripts.evidence page
    python -m scripts.evidence all [--quick]

A study is a module with TITLE and ``run(quick, into) -> Result``. Its full result is kept in results/STUDY and
becomes a page in docs/results. Whether a claim held is decided by the study's code from its own numbers;
:mod:`.review` has the verdicts that a later look has withdrawn. The newest study is the package :mod:`.recipes`.
"""

#: In the order of the page.
STUDIES = ("valleys", "large_batch", "images", "gpt", "ablation", "flatness", "memory")
