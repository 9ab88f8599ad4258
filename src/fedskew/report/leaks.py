"""What leaves a site, to whom, and what it can reveal, in words, by group of the payload."""

from __future__ import annotations

from typing import NamedTuple


class Leak(NamedTuple):
    """One group of an update in words."""

    what: str
    reveals: str


MODEL = Leak("the trained model", "whether a sample was trained on, and which classes the site has; rarely samples")
LEAKS: dict[str, Leak] = {
    "parameters": MODEL,
    "buffers": Leak("batch-norm statistics, where the net has them", "means and variances of the site's features"),
    "direction": Leak("the change of the model, divided by the number of steps", MODEL.reveals),
    "steps": Leak("the number of local steps", "about how many samples the site has"),
    "control": Leak("the change of its control variate", "a mean gradient: as the model's change"),
    "gradient": Leak("the change of its mean gradient", "a mean gradient: as the model's change"),
    "drift": Leak("the length of the model's change", "how far its data are from the others'"),
    "prototypes": Leak(
        "the mean feature of each class, and how many samples it has",
        "the label distribution exactly; of a class with one sample, that sample's feature (privacy.min_count)",
    ),
    "class_sums": Leak(
        "the sum of features of each class, and how many samples it has",
        "the label distribution exactly; of a class with one sample, that sample's feature (privacy.min_count)",
    ),
    "moments": Leak(
        "for each class the number of samples and the sums of features and of their products",
        "the label distribution exactly; of a class with one or two samples, their features (privacy.min_count)",
    ),
    "gradients": Leak(
        "the head's gradient for each class, and how many samples it has",
        "the label distribution exactly; of a class with one sample, that sample's feature (privacy.min_count)",
    ),
    "labels": Leak("how many samples each class has", "the label distribution exactly"),
    "choice": Leak("the model it chose", "which other sites have similar data"),
    "extra": Leak("the head for virtual images", "as the model"),
}
UNKNOWN = Leak("further tensors", "not known: see the method's equations")
ALWAYS = (
    "With every update its number of samples and its mean loss, and after an evaluation its counts of right "
    "predictions by class."
)


def leaks_of(groups: list[str]) -> dict[str, Leak]:
    """What the groups of an update are and reveal, by group."""
    return {group: LEAKS.get(group, UNKNOWN) for group in groups}


def sight(sums_only: bool) -> str:
    """What the server must see of the clients' updates."""
    return "sums" if sums_only else "each client's model"
