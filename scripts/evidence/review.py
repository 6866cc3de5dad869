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

#: Study -> its question, and what may be concluded from it today.
ANSWERS = {
    "valleys": (
        "Does an adapted optimizer go on along a valley after it has reached it?",
        "Without noise, in functions of two variables, alpha -80 goes further in most pairs. It does not end lower. "
        "There is one rate a pair and no measure of error.",
    ),
    "large_batch": (
        "Does training on all data at once need more epochs, and fewer with ALTO?",
        "All optimizers need 60 to 90 times the epochs of small batches. Three seeds show no difference between them.",
    ),
    "images": (
        "Is ALTO more accurate than other optimizers on images?",
        "These runs cannot tell: three seeds, and differences of an image or two among 597.",
    ),
    "gpt": (
        "Is ALTO ahead of LAMB and others on a tiny GPT-2, and does alpha want to be negative?",
        "These runs cannot tell: three seeds. The lead of alpha 9 goes with less momentum and slower vectors "
        "([first look](first-look.md)), which were not controlled here. [Optimizers](optimizers.md) is newer.",
    ),
    "ablation": (
        "Which part of ALTO is worth what?",
        "The layer-wise ratio is worth the most, by far. Three seeds show nothing of the other parts.",
    ),
    "flatness": (
        "Does the sign of alpha decide how flat a minimum is?",
        "Not in these runs. At equal training loss a negative alpha is about as often sharper as flatter. It goes "
        "further from the start.",
    ),
    "memory": (
        "How much memory does ALTO need beyond LAMB?",
        "One float32 tensor a parameter: 23% of a small step at a micro-batch of 1, and 1% at 64. The authors' own "
        "code needs four to seven.",
    ),
}

#: Study -> what its tables do not show.
CAVEATS = {
    "gpt": (
        "LAMB with beta2 0.5, ALTO with alpha 9 and with alpha -30 have their best lr at an end of the grid: a better "
        "one may be outside.",
        '"longer" keeps the lr that was tuned for 240 iterations.',
        '"epochs" overfits: its best lr is the smallest.',
        "Of the others lr alone was tuned; ALTO had nine pairs of alpha and beta1, LAMB three beta2.",
    ),
    "images": ("Differences are not paired by seed.", "One image is 0.17 points."),
    "ablation": ("Differences are not paired by seed.", "One image is 0.17 points."),
    "flatness": ("Where an alpha is further on, it is also flatter: the last column but one compares at equal loss.",),
}

#: Study -> the first words of a claim -> what may be concluded.
REVIEWS: dict[str, dict[str, Review]] = {
    "valleys": {
        "The longer the explored valley": Review(MIXED, "One rate, and no measure of error."),
        "An adapted optimizer goes on": Review(MIXED, "One rate for each pair, and no measure of error."),
    },
    "large_batch": {
        "At full batch the same task": Review(
            UNTESTABLE, "Every seed needs 50 times the epochs or more, but there are three seeds, and one rate for all."
        ),
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
        "A negative alpha explores": Review(MIXED, "One rate, changed after a look; losses differ."),
        "A negative alpha converges": Review(MIXED, "One rate; on GPT-2, with three seeds, it is the other way round."),
    },
}


def reviewed(study: str, claim: str, verdict: str) -> Review:
    """The verdict on a claim that stands today, and why it is another than the study's own; "" if it is the same."""
    for words, review in REVIEWS.get(study, {}).items():
        if claim.startswith(words):
            return review
    return Review(verdict, "")
