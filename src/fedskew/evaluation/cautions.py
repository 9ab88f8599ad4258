"""What a table of figures would hide: classes that a model never recognises, and models that say one class only."""

from __future__ import annotations

from collections.abc import Sequence

from fedskew.evaluation.metrics import ClientMetrics, Detail, Metrics

NAMED = 5  # classes that are listed one by one; beyond that they are counted


def cautions(metrics: Metrics | None, names: Sequence[str] = ()) -> list[str]:
    """Sentences to print below the figures of a run, about the model that leads and the personal models.

    `names` are the classes' names; without them they are numbered.

    >>> from fedskew.evaluation.metrics import ModelMetrics
    >>> all_healthy = ModelMetrics(
    ...     accuracy=0.9, loss=1.0, per_class=[1.0, 0.0], samples=[18, 2], predicted=[20, 0], balanced_accuracy=0.5
    ... )
    >>> for sentence in cautions(Metrics(global_=all_healthy), ["healthy", "sick"]):
    ...     print(sentence)
    warning: the global model predicts class 'healthy' for every sample
    warning: the global model recognised no sample of class 'sick' (0 of 2)
    """
    if metrics is None or metrics.leading is None:
        return []
    personal = metrics.clients.personal if metrics.clients is not None else None
    leading = metrics.leading
    found = cautions_about(leading, names, "the personal models" if leading is personal else "the global model")
    if personal is not None and personal != (metrics.clients and metrics.clients.global_):
        found += [] if leading is personal else cautions_about(personal, names, "the personal models")
        found += _one_class_clients(personal)
    if metrics.clients is not None and metrics.global_ is not None:
        found += _one_class_samples(metrics.clients.personal, names, "the clients' test samples are all")
    return found


def _one_class_samples(detail: Detail, names: Sequence[str], which: str) -> list[str]:
    """A sentence if all samples are of one class: a model that always says this class has 100 % of everything."""
    there = [c for c, count in enumerate(detail.samples) if count]
    if len(there) != 1 or len(detail.samples) < 2:
        return []
    name = f"'{names[there[0]]}'" if there[0] < len(names) else str(there[0])
    return [f"warning: {which} of class {name}, so these figures do not show whether a model tells classes apart"]


def _one_class_clients(personal: ClientMetrics) -> list[str]:
    """A sentence if most clients have test samples of one class: a personal model need only name it there."""
    over, clients = personal.over, personal.clients
    several = over.auroc.clients if over.auroc is not None else 0
    if over.balanced_accuracy is None or 2 * several >= clients:
        return []
    return [
        f"note: {clients - several} of {clients} clients have test samples of one class only; "
        "a personal model that always says this class is right there"
    ]


def cautions_about(detail: Detail, names: Sequence[str], who: str) -> list[str]:
    """Sentences about one model; `who` is what they call it, such as "the global model"."""
    labels = [f"'{names[c]}'" if c < len(names) else str(c) for c in range(len(detail.per_class))]
    many = len(detail.per_class) > 1
    sentences = _one_class_samples(detail, names, "all test samples are")
    said = [c for c, count in enumerate(detail.predicted) if count]
    if len(said) == 1 and many:
        verb = "predict" if who.endswith("s") else "predicts"
        sentences.append(f"warning: {who} {verb} class {labels[said[0]]} for every sample")
    missed = [c for c, recall in enumerate(detail.per_class) if recall == 0]
    if len(missed) > NAMED:
        listed = ", ".join(labels[c] for c in missed[:NAMED])
        sentences.append(f"warning: {who} recognised no sample of {len(missed)} classes: {listed} and others")
    else:
        for c in missed:
            of = f" (0 of {detail.samples[c]})" if detail.samples else ""
            sentences.append(f"warning: {who} recognised no sample of class {labels[c]}{of}")
    absent = [c for c, recall in enumerate(detail.per_class) if recall is None]
    if absent:
        listed = ", ".join(labels[c] for c in absent[:NAMED]) + (" and others" if len(absent) > NAMED else "")
        sentences.append(
            f"note: {len(absent)} of {len(labels)} classes have no test sample ({listed}); "
            "balanced accuracy, AUROC and AUPRC leave them out"
        )
    return sentences
