"""Verdicts that a later look at a study's method has changed.

The studies were made before the rule of :mod:`.paired`: most have three seeds, with which no difference counts. Their
results stay as they were; what may be concluded from them stands here until somebody runs them again.
"""

from __future__ import annotations

from dataclasses import dataclass

from .study import MIXED, UNTESTABLE

_THREE = "Three seeds do not show a difference."
_CHOSEN = "The rates were chosen on the reported test set, and one image is 0.17 points."


@dataclass(frozen=True)
class Review:
    """Of one claim."""

    verdict: str
    why: str


#: Study -> what stands after a plus-minus sign in its committed findings.
SPREADS = {
    "gpt": "A number after +- is one standard error.",
    "images": "A number after ± is half of the range over the seeds.",
    "ablation": "A number after ± is half of the range over the seeds.",
}

#: Study -> the first words of a claim -> what may be concluded.
REVIEWS: dict[str, dict[str, Review]] = {
    "valleys": {
        "The longer the explored valley": Review(MIXED, "One rate, and no measure of error."),
        "An adapted optimizer goes on": Review(MIXED, "One rate for each pair, and no measure of error."),
    },
    "large_batch": {
        "At the same rate the adapted": Review(UNTESTABLE, f"{_THREE} One rate was tried."),
        "At full batch the loss falls": Review(UNTESTABLE, _THREE),
    },
    "images": {
        "With large batches ALTO has": Review(UNTESTABLE, f"{_THREE} {_CHOSEN}"),
        "With large batches ALTO is more": Review(UNTESTABLE, f"{_THREE} {_CHOSEN}"),
        "With small batches ALTO": Review(UNTESTABLE, f"{_THREE} {_CHOSEN}"),
        "The larger the batch": Review(UNTESTABLE, f"{_THREE} {_CHOSEN}"),
    },
    "gpt": {
        "ALTO reaches a lower perplexity": Review(
            UNTESTABLE, f"{_THREE} The others' rates were tuned, and nothing else of theirs."
        ),
        "ALTO (alpha -5": Review(UNTESTABLE, f"{_THREE} The newer study has five."),
        "ALTO comes to Lion's": Review(UNTESTABLE, f"{_THREE} Lion's rate alone was tuned."),
        "ALTO trains faster": Review(UNTESTABLE, _THREE),
        "The larger the batch": Review(UNTESTABLE, "In 21 iterations an average over 100 steps does nothing."),
        "At large batch alpha should": Review(
            UNTESTABLE, "Momentum and the rate of vectors, which were not controlled, explain the lead of alpha 9."
        ),
    },
    "ablation": {
        "Every part of ALTO is indispensable (here with alpha -5)": Review(UNTESTABLE, f"{_THREE} {_CHOSEN}"),
        "Every part of ALTO is indispensable (here with alpha -50)": Review(UNTESTABLE, f"{_THREE} {_CHOSEN}"),
        "Of the single parts": Review(MIXED, f"The largest difference by far, but {_CHOSEN[0].lower()}{_CHOSEN[1:]}"),
    },
    "flatness": {
        "A negative alpha ends in flatter minima than a positive": Review(
            MIXED, "At equal loss it is flatter in 1 and sharper in 2 of 5 pairs."
        ),
        "A negative alpha explores": Review(MIXED, "One rate, changed after a look; losses differ."),
    },
}


def reviewed(study: str, claim: str, verdict: str) -> Review:
    """The verdict on a claim that stands today, and why it is another than the study's own; "" if it is the same."""
    for words, review in REVIEWS.get(study, {}).items():
        if claim.startswith(words):
            return review
    return Review(verdict, "")
