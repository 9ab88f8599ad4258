"""Trained models as files that other programs load: PyTorch's export format, ONNX, safetensors."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from fedskew.core.files import write_atomically
from fedskew.core.settings import UsageError, library, path_of
from fedskew.experiment.card import ModelCard
from fedskew.experiment.use import TrainedModel
from fedskew.federation.wire import encode_plain

SUFFIXES = (".pt", ".pt2", ".onnx", ".safetensors")


def export(model: TrainedModel, path: Path | str) -> None:
    """Write a model to a file; its name says how.

    .pt or .pt2: a program that `torch.export.load` reads, from raw samples to logits. .onnx: the same for ONNX
    (input "x", output "logits"). .safetensors: the weights alone, under the names of your own net, with model.json in
    the metadata.
    """
    if not isinstance(model, TrainedModel):
        raise UsageError(f"{model!r} is no trained model: expected what fedskew.load(RUN) returns.")
    path = path_of(path, "path")
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path} is invalid: expected a file that ends in {', '.join(SUFFIXES)}.")
    if path.suffix == ".onnx":
        library("onnx", "onnx")
        library("onnxscript", "onnx")
    if path.suffix == ".safetensors":
        export_weights(model.card, model.state_dict(), path)
    else:
        _write(path, _onnx(model) if path.suffix == ".onnx" else _program(model))


def export_weights(card: ModelCard, weights: Mapping[str, Tensor], path: Path) -> None:
    """Write weights to a safetensors file."""
    _write(path, encode_plain(weights, {"format": "pt", "model.json": _json(card)}))


def _write(path: Path, blob: bytes) -> None:
    try:
        write_atomically(path, blob)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from None


def _json(card: ModelCard) -> str:
    return msgspec.json.encode(card).decode()


def _files(card: ModelCard) -> dict[str, str]:
    """What is kept beside the graph."""
    return {"model.json": _json(card), "classes.json": json.dumps(card.labels)}


def _exported(model: TrainedModel) -> torch.export.ExportedProgram:
    """The model as a graph, for any number of samples."""
    any_number = ({0: torch.export.Dim.DYNAMIC},)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about itself
        return torch.export.export(model.module(), (model.card.example(2),), dynamic_shapes=any_number)


def _program(model: TrainedModel) -> bytes:
    stream = io.BytesIO()
    torch.export.save(_exported(model), stream, extra_files=_files(model.card))
    return stream.getvalue()


def _onnx(model: TrainedModel) -> bytes:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = torch.onnx.export(_exported(model), input_names=["x"], output_names=["logits"], verbose=False)
    assert made is not None
    proto = made.model_proto
    for key, value in _files(model.card).items():
        proto.metadata_props.add(key=key, value=value)
    return bytes(proto.SerializeToString())
