"""`fedskew predict`, `export` and `embed`: the model of a finished run in use."""

from __future__ import annotations

import csv
import io
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedskew.cli.console import make_screen, make_table, print_json
from fedskew.cli.options import DataDir, Json
from fedskew.cli.quick_start import load_torch
from fedskew.core.settings import UsageError
from fedskew.evaluation.figures import percent

if TYPE_CHECKING:
    from fedskew.data.sources.inputs import Inputs
    from fedskew.evaluation.metrics import ModelMetrics
    from fedskew.experiment.use import Predictions, TrainedModel

SHOWN = 20  # samples on the screen

RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a finished run.")]
Client = Annotated[str | None, typer.Option(metavar="CLIENT", help="Use this client's own model (number or name).")]
OwnNet = Annotated[str | None, typer.Option("--net", metavar="FILE.py:NAME", help="The net, if it is one of your own.")]


def add_commands(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command("predict")(predict_command)
    app.command("export")(export_command)
    app.command("embed")(embed_command)


def predict_command(
    run: RunDir,
    data: Annotated[
        str,
        typer.Option(
            metavar="DATA",
            help="Folder of images, .csv or .npz; with ?label=COLUMN a .csv is also scored. Or a data set's name.",
        ),
    ],
    client: Client = None,
    net: OwnNet = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the predictions to this CSV file.")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Predict the classes of new samples with the model of a finished run."""
    load_torch()
    from fedskew.data.sources.inputs import read_inputs
    from fedskew.experiment.scored import scored
    from fedskew.experiment.use import load

    model = load(run, client=client, net=net, data_dir=data_dir)
    inputs = read_inputs(data, model.card.shape, model.card.table, data_dir)
    predictions = model.predict(inputs.x)
    score = scored(predictions, inputs.labels, folders=inputs.folders)
    if out is not None:
        write_csv(out, predictions, inputs)
    if as_json:
        about = {"run": str(run), "client": model.client, **as_dict(predictions, inputs)}
        keys = ("accuracy", "balanced_accuracy", "macro_f1")
        figures = {key: None if score is None else getattr(score, key) for key in keys}
        print_json(about | figures | {"warnings": [*own_data_note(model, data), *score_cautions(model, score)]})
    else:
        show(model, predictions, inputs, score, out)
        for note in own_data_note(model, data) if score is not None else []:
            make_screen(False).print(note)


def export_command(
    run: RunDir,
    to: Annotated[Path, typer.Option(metavar="FILE", help="File to write: .pt, .onnx or .safetensors.")],
    client: Client = None,
    net: OwnNet = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Write the model of a finished run to a file for other programs.

    A .pt (for torch.export.load) and an .onnx take raw samples: normalisation and filling are included. A .safetensors
    holds the weights alone.
    """
    from fedskew.experiment.export import export, export_weights
    from fedskew.experiment.model_files import read_card
    from fedskew.experiment.use import client_name, client_number, load, own_weights

    card = read_card(run)
    if card is not None and card.module and net is None and client is None and to.suffix == ".safetensors":
        export_weights(card, own_weights(run, card), to)  # needs no class of the user's
    else:
        model = load(run, client=client, net=net, data_dir=data_dir)
        card = model.card
        export(model, to)
    number = None if client is None else client_number(card, client)
    name = card.net or card.module
    if as_json:
        about = {"file": str(to), "net": name, "client": number, "classes": list(card.labels), "takes": card.expects()}
        print_json(about | {"bytes": to.stat().st_size})
    else:
        whose = "the global model" if number is None else f"the model of client {client_name(card, number)}"
        make_screen(as_json).print(f"wrote {whose} ({name}) to {to}; it takes {card.expects()}")


def as_dict(predictions: Predictions, inputs: Inputs) -> dict[str, Any]:
    """The predictions as plain values."""
    rows = zip(inputs.names, predictions.classes, predictions.probabilities.tolist(), strict=True)
    return {
        "classes": list(predictions.labels),
        "predictions": [{"sample": name, "class": found, "probabilities": row} for name, found, row in rows],
    }


def write_csv(path: Path, predictions: Predictions, inputs: Inputs) -> None:
    """One row per sample: its name, its class, and the probability of each class."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["sample", "class", *(f"p({label})" for label in predictions.labels)])
    for name, found, row in zip(inputs.names, predictions.classes, predictions.probabilities.tolist(), strict=True):
        writer.writerow([name, found, *(f"{p:.6f}" for p in row)])
    try:
        path.write_text(stream.getvalue())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from None


def own_data_note(model: TrainedModel, data: str) -> list[str]:
    """A sentence if the samples are those that the run had: figures of samples that were trained on say little."""
    from fedskew.data.sources.loading import SOURCES
    from fedskew.data.sources.user_data import path_and_options

    if data in SOURCES or path_and_options(data)[0].resolve() != path_and_options(model.card.data)[0].resolve():
        return []
    return ["note: these are the data of the run: the model was trained on most of the samples"]


def score_cautions(model: TrainedModel, score: ModelMetrics | None) -> list[str]:
    """Sentences about what the figures of predictions would hide; [] if the classes are not known."""
    from fedskew.evaluation.cautions import cautions_about

    return [] if score is None else cautions_about(score, model.card.labels, model.whose)


def show(
    model: TrainedModel, predictions: Predictions, inputs: Inputs, score: ModelMetrics | None, out: Path | None
) -> None:
    """Print the first predictions, how many there are of each class, and figures if the classes are known.

    Balanced accuracy comes first where classes have unequal numbers of samples: there accuracy alone would mislead.
    """
    screen = make_screen(False)
    best = predictions.probabilities.max(axis=1)
    rows = list(zip(inputs.names, predictions.classes, (f"{p:.3f}" for p in best), strict=True))
    whose = "global model" if model.client is None else f"model of client {model.client}"
    screen.print(make_table(f"{model.card.method}, {whose}", ["sample", "class", "probability"], rows[:SHOWN]))
    if len(rows) > SHOWN:
        screen.print(f"... and {len(rows) - SHOWN} more" + ("" if out else "; --out FILE.csv writes all"))
    counts = Counter(predictions.classes)
    screen.print(f"\n{len(rows)} samples: " + ", ".join(f"{counts[name]} {name}" for name in predictions.labels))
    if score is not None:
        accuracy = f"accuracy {percent(score.accuracy)} %"
        more = f"balanced accuracy {percent(score.balanced_accuracy)} %, macro F1 {percent(score.macro_f1)} %, "
        screen.print(accuracy if score.balanced else more + accuracy)
    for caution in score_cautions(model, score):
        screen.print(caution)
    if out is not None:
        screen.print(f"written to {out}")


def embed_command(
    data: Annotated[str, typer.Option(metavar="DATA", help="Name of a data set, or a path to your own.")],
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="Directory of a finished run, or a net: a name, or my.py:name.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The .npz file to write.")],
    head: Annotated[str, typer.Option(metavar="LAYER", help="Last layer of your own net, which is left out.")] = "",
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the initial values of a net by name.")] = 0,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Write a data set as features of a net that is not trained further.

    Heads on them train in seconds: fedskew run --data FILE --model linear, or --method fedncm.
    """
    import numpy as np

    from fedskew.core.files import write_atomically
    from fedskew.data.sources.loading import load as load_data
    from fedskew.experiment.embed import embed

    if out.suffix != ".npz":
        raise UsageError(f"--out {out} is invalid: expected a file that ends with .npz.")
    arrays = embed(load_data(data, data_dir), model, head=head, seed=seed)
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]  # its stub takes any keyword for allow_pickle
    write_atomically(out, file.getvalue())
    samples, features = arrays["x_train"].shape
    if as_json:
        print_json({"file": str(out), "samples": samples, "features": features})
        return
    print(f"{out}: {samples} training samples, {len(arrays.get('x_test', ()))} test samples, {features} features")
    print(f"next: fedskew run --data {out} --model linear")
