"""The model of a finished run in use: predictions are those of evaluation, exports answer as the model does."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

import fedskew as fs
from fedskew.core.settings import UsageError
from fedskew.core.training import Training
from fedskew.experiment.assemble import assemble
from fedskew.experiment.config import Experiment
from fedskew.experiment.run import Run
from fedskew.experiment.use import TrainedModel, load
from fedskew.methods import REGISTRY

SAVED = Path(__file__).parent / "saved-runs"
DIGITS = Experiment(split="dirichlet:alpha=0.5,clients=3", model="mlp:hidden=8", rounds=2)
HEART = Experiment(data="heart", split="natural", model="mlp:hidden=8", rounds=2)


def finished(out: Path, experiment: Experiment) -> Run:
    run = Run(experiment, out=out)
    list(run)
    return run


@cache
def digits() -> tuple[Any, Any]:
    data = fs.load_data("digits")
    return data.x_test, data.y_test


def accuracy(model: TrainedModel, x: Any, y: Any) -> float:
    return float((model.predict(x).numbers == np.asarray(y)).mean())


def own_test_part(run: Run, client: int) -> tuple[Any, Any]:
    """Raw test samples of one client."""
    world = run.assembled.world
    index = world.test[client]
    return world.x[index].numpy(), world.y[index].numpy()


@pytest.mark.parametrize("model", ["mlp:hidden=8", "cnn4", "cnn:channels=2,hidden=4"])
def test_the_global_model_has_the_accuracy_that_the_run_recorded(tmp_path: Path, model: str) -> None:
    data = fs.load_data("digits")
    if model == "cnn4":  # which needs 16 x 16
        data = fs.DataSet(
            *("big", np.kron(data.x_train[:200], np.ones((1, 2, 2, 1), np.uint8)), data.y_train[:200]),
            *(np.kron(data.x_test, np.ones((1, 2, 2, 1), np.uint8)), data.y_test, 10, None, None, (0.5,), (0.3,)),
        )
    run = finished(tmp_path, Experiment(data=data, split="iid:clients=2", model=model, rounds=1))
    assert run.result is not None
    assert run.result.metrics is not None
    assert run.result.metrics.global_ is not None
    assert accuracy(load(tmp_path), data.x_test, data.y_test) == run.result.metrics.global_.accuracy


@pytest.mark.parametrize("method", [fs.FedPer(), fs.FineTune(), fs.Ditto(), fs.Local()], ids=lambda m: type(m).__name__)
def test_a_personal_model_has_the_accuracy_that_the_run_recorded(tmp_path: Path, method: Any) -> None:
    run = finished(tmp_path, Experiment(method=method, split=DIGITS.split, model="mlp:hidden=8", rounds=2, seed=3))
    assert run.result is not None
    for client in (0, 2):
        recorded = run.result.clients[str(client)].personal
        assert recorded is not None
        assert accuracy(load(tmp_path, client=client), *own_test_part(run, client)) == recorded.accuracy


@pytest.mark.slow  # a run of every method
@pytest.mark.parametrize("name", REGISTRY)
def test_what_is_loaded_is_what_was_evaluated_for_every_method(tmp_path: Path, name: str) -> None:
    kind = REGISTRY[name]
    split = ("public:per_class=4+" if kind.public else "") + "dirichlet:alpha=0.5,clients=3,min=5"
    experiment = Experiment(method=kind(**kind.quick), split=split, model="mlp:hidden=16", rounds=2)
    run = finished(tmp_path, experiment)
    assert run.result is not None
    assert run.result.metrics is not None
    if kind.has_global:
        assert run.result.metrics.global_ is not None
        assert accuracy(load(tmp_path), *digits()) == run.result.metrics.global_.accuracy
    personal = run.result.clients["1"].personal
    assert personal is not None
    assert accuracy(load(tmp_path, client=1), *own_test_part(run, 1)) == personal.accuracy


def test_a_table_is_predicted_from_its_file_as_the_run_recorded(tmp_path: Path, fedskew: Any) -> None:
    run = finished(tmp_path / "run", HEART)
    assert run.result is not None
    assert run.result.metrics is not None
    assert run.result.metrics.global_ is not None
    said = fedskew("predict", str(tmp_path / "run"), "--data", "heart", "--json").json()
    assert said["accuracy"] == run.result.metrics.global_.accuracy
    assert said["classes"] == ["healthy", "disease"]
    assert {row["class"] for row in said["predictions"]} <= {"healthy", "disease"}
    source = Path(fs.__file__).parent / "data" / "sources" / "heart.csv"
    held_out = load_rows(source)
    (tmp_path / "new.csv").write_text(held_out)
    again = fedskew(
        "predict", str(tmp_path / "run"), "--data", f"{tmp_path}/new.csv?label=disease&owner=hospital", "--json"
    ).json()
    assert again["accuracy"] == said["accuracy"]


def load_rows(source: Path) -> str:
    """The rows of the table's test part as text, columns reversed: they are matched by name."""
    from fedskew.data.dataset import holdout_mask, one_in

    header, *rows = [line.split(",") for line in source.read_text().splitlines()]
    mask = holdout_mask(np.array([row[header.index("disease")] for row in rows]), one_in(5))
    kept = [header, *(row for row, held in zip(rows, mask, strict=True) if held)]
    return "\n".join(",".join(reversed(row)) for row in kept) + "\n"


def test_the_card_says_everything_that_a_model_needs(tmp_path: Path) -> None:
    finished(tmp_path, HEART)
    card = json.loads((tmp_path / "model.json").read_text())
    assert (card["net"], card["kind"], card["labels"]) == ("mlp:hidden=8", "table", ["healthy", "disease"])
    assert card["clients"] == ["cleveland", "hungarian", "switzerland", "va"]
    assert [column["name"] for column in card["table"]["columns"]][:3] == ["age", "sex", "cp"]
    assert card["shape"] == [len(load(tmp_path).card.table.features)]  # type: ignore[union-attr]


def test_auto_is_replaced_by_the_name_of_the_net(tmp_path: Path) -> None:
    finished(tmp_path, Experiment(split="iid:clients=2", rounds=1, training=Training(batch_size=500)))
    assert load(tmp_path).card.net == "mlp"


# Exports.


@pytest.mark.slow  # torch.export takes seconds to import
def test_an_exported_program_takes_raw_images_and_answers_the_same(tmp_path: Path) -> None:
    finished(tmp_path / "run", DIGITS)
    model, (x, _) = load(tmp_path / "run"), digits()
    fs.export(model, tmp_path / "model.pt")
    with (tmp_path / "model.pt").open("rb") as file:
        program = torch.export.load(file).module()
    assert torch.allclose(program(torch.from_numpy(x)), model.logits(x), atol=1e-5)
    assert torch.allclose(program(torch.from_numpy(x[:1])), model.logits(x[:1]), atol=1e-5)


@pytest.mark.slow  # torch.onnx takes seconds to import
@pytest.mark.parametrize("experiment", [DIGITS, HEART], ids=["images", "table"])
def test_an_onnx_file_takes_raw_samples_and_answers_the_same(tmp_path: Path, experiment: Experiment) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    finished(tmp_path / "run", experiment)
    model = load(tmp_path / "run", client=1)
    fs.export(model, tmp_path / "model.onnx")
    x = digits()[0] if experiment is DIGITS else with_gaps(model)
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    (logits,) = session.run(["logits"], {"x": x})
    assert np.allclose(logits, model.logits(x).numpy(), atol=1e-5)
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes.json"]) == list(model.card.labels)


def with_gaps(model: TrainedModel) -> Any:
    """Rows of the heart table as the model takes them: numbers, codes, gaps, and a code that it does not know."""
    data = fs.load_data("heart")
    assert model.card.table is not None
    x = model.card.table.matrix(data.x_test, data.columns)
    x[0, 2] = 77
    assert np.isnan(x).any()
    return x


def test_an_exported_table_model_fills_gaps_itself(tmp_path: Path) -> None:
    finished(tmp_path / "run", HEART)
    model = load(tmp_path / "run")
    x = with_gaps(model)
    assert torch.allclose(model.module()(torch.from_numpy(x)), model.logits(x), atol=1e-5)
    assert np.array_equal(x[:, 2], x[:, 2])  # codes of chest pain are the table's own, 1 to 4


class Small(nn.Module):
    """A user's net with names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 8)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.ModuleDict({"fc": nn.Linear(8, 10)})

    def forward(self, x: Tensor) -> Tensor:
        return self.out["fc"](torch.relu(self.norm(self.stem(x.flatten(1)))))


def test_an_own_net_keeps_its_names_and_its_class_is_needed_only_to_run_it(tmp_path: Path, fedskew: Any) -> None:
    net = Small()
    run = finished(tmp_path / "run", Experiment(split="iid:clients=2", model=net, head="out.fc", rounds=1))
    said = fedskew("predict", str(tmp_path / "run"), "--data", "digits")
    assert said.code == 2
    assert "test_use.Small: give it with --net FILE.py:NAME" in said.err
    assert "fedskew.load(" in said.err
    assert fedskew("export", str(tmp_path / "run"), "--to", "w.safetensors").code == 0
    weights = load_file(tmp_path / "w.safetensors")
    assert weights.keys() == net.state_dict().keys()
    plain = Small()
    plain.load_state_dict(weights)
    model = load(tmp_path / "run", net=Small())
    x, y = digits()
    assert run.result is not None
    assert accuracy(model, x, y) == run.result.accuracy
    assert torch.allclose(plain.eval()(model.card.inputs()(torch.from_numpy(x))), model.logits(x), atol=1e-5)
    assert torch.allclose(model.module()(torch.from_numpy(x)), model.logits(x), atol=1e-5)
    assert model.state_dict().keys() == net.state_dict().keys()


OWN_FILE = """
from pathlib import Path
from torch import nn
Path("imported").touch()
def net(shape, classes, width=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, classes))
"""


def test_code_that_a_run_names_is_run_only_if_the_user_names_it_too(tmp_path: Path, fedskew: Any) -> None:
    (tmp_path / "my.py").write_text(OWN_FILE)
    options = ["--model", "my.py:net:width=6", "--split", "iid:clients=2", "--workers", "1"]
    done = fedskew("run", *options, "--rounds", "1", "--out", "run", "--json").json()
    (tmp_path / "imported").unlink()
    shutil.move(tmp_path / "my.py", tmp_path / "moved.py")
    said = fedskew("predict", "run", "--data", "digits")
    assert (said.code, "give it with --net my.py:net:width=6" in said.err) == (2, True), said.err
    card = json.loads((tmp_path / "run" / "model.json").read_text())
    hostile = card | {"net": "moved.py:net", "module": ""}
    (tmp_path / "run" / "model.json").write_text(json.dumps(hostile))
    assert fedskew("predict", "run", "--data", "digits").code == 2
    settings = (tmp_path / "run" / "settings.toml").read_text()
    for text in (settings.replace("my.py:net", "moved.py:net"), settings.replace('"fedavg"', '"moved.py:net"')):
        (tmp_path / "run" / "model.json").write_text(json.dumps(card | {"net": "mlp", "module": ""}))
        (tmp_path / "run" / "settings.toml").write_text(text)
        assert fedskew("predict", "run", "--data", "digits", "--client", "1").code == 2
        (tmp_path / "run" / "model.json").unlink()
        assert fedskew("predict", "run", "--data", "digits").code == 2
    (tmp_path / "run" / "settings.toml").write_text(settings)
    assert not (tmp_path / "imported").exists()
    (tmp_path / "run" / "model.json").write_text(json.dumps(card))
    net = ["--net", "moved.py:net:width=6"]
    assert fedskew("predict", "run", "--data", "digits", *net, "--json").json()["accuracy"] == done["accuracy"]
    assert fedskew("export", "run", *net, "--client", "1", "--to", "w.safetensors").code == 0
    assert list(load_file(tmp_path / "w.safetensors")) == ["1.weight", "1.bias", "3.weight", "3.bias"]


def test_a_model_without_batch_norm_statistics_predicts_as_evaluation_did_and_is_not_exported(tmp_path: Path) -> None:
    local = Training(batch_norm="local")
    experiment = Experiment(split="iid:clients=2", model=Small(), head="out.fc", rounds=1, training=local)
    run = finished(tmp_path, experiment)
    model = load(tmp_path, net=Small())
    assert run.result is not None
    assert accuracy(model, *digits()) == run.result.accuracy
    with pytest.raises(UsageError, match="batch_norm=local"):
        fs.export(model, tmp_path / "model.pt")
    own = load(tmp_path, net=Small(), client=1)
    recorded = run.result.clients["1"].personal
    assert recorded is not None
    assert accuracy(own, *own_test_part(run, 1)) == recorded.accuracy
    own.module()


# Inputs.


def test_a_folder_of_images_is_predicted_with_or_without_classes(tmp_path: Path, fedskew: Any) -> None:
    finished(tmp_path / "run", DIGITS)
    x, y = digits()
    for i in range(6):
        for path in (tmp_path / "new" / f"{i}.png", tmp_path / "known" / str(y[i]) / f"{i}.png"):
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(x[i, :, :, 0]).save(path)
    said = fedskew("predict", str(tmp_path / "run"), "--data", "new", "--out", "p.csv", "--json").json()
    expected = load(tmp_path / "run").predict(x[:6])
    assert [row["class"] for row in said["predictions"]] == expected.classes
    assert said["accuracy"] is None
    lines = (tmp_path / "p.csv").read_text().splitlines()
    assert lines[0].startswith("sample,class,p(0),p(1)")
    assert lines[1].split(",")[:2] == ["0.png", expected.classes[0]]
    known = fedskew("predict", str(tmp_path / "run"), "--data", "known", "--json").json()
    assert known["accuracy"] == pytest.approx(np.mean(expected.numbers == y[:6]))
    assert "6 samples: " in fedskew("predict", str(tmp_path / "run"), "--data", "new").out


def test_an_npz_needs_no_classes(tmp_path: Path) -> None:
    finished(tmp_path / "run", DIGITS)
    x, _ = digits()
    np.savez(tmp_path / "x.npz", x=x[:7, :, :, 0])
    model = load(tmp_path / "run")
    assert model.predict(tmp_path / "x.npz").classes == model.predict(torch.from_numpy(x[:7])).classes


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("digits") / "run"
    finished(path, DIGITS)
    return path


@pytest.fixture(scope="module")
def table_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heart") / "run"
    finished(path, HEART)
    return path


@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        (np.zeros((2, 9, 8, 1), np.uint8), r"uint8\[2, 9, 8, 1\] do not fit the model: expected images of 8x8"),
        (np.zeros((2, 8, 8, 3), np.uint8), "with 1 channel"),
        (np.zeros((2, 8, 8, 1), np.float32), "do not fit"),
        (np.zeros((0, 8, 8, 1), np.uint8), "do not fit"),
        (["a"], "do not fit"),
        ("nowhere.csv", "nowhere.csv does not exist"),
    ],
)
def test_samples_that_do_not_fit_an_image_model_are_one_sentence(run: Path, x: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        load(run).predict(x)


def test_images_of_another_size_and_tables_for_an_image_model_are_one_sentence(run: Path, tmp_path: Path) -> None:
    Image.new("L", (9, 8)).save(tmp_path / "a.png")
    with pytest.raises(UsageError, match=r"a.png has 9x8 pixels: the model takes 8x8; .*\?size=8 resizes"):
        load(run).predict(tmp_path)
    assert len(load(run).predict(f"{tmp_path}?size=8").classes) == 1
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="is a table, but the model was not trained on one"):
        load(run).predict(tmp_path / "t.csv")
    (tmp_path / "b.png").write_bytes(b"nothing")
    with pytest.raises(UsageError, match=r"b\.png cannot be used"):
        load(run).predict(f"{tmp_path}?size=8")


def test_rows_that_do_not_fit_a_table_model_are_one_sentence(table_run: Path, tmp_path: Path, fedskew: Any) -> None:
    model = load(table_run)
    with pytest.raises(UsageError, match="expected rows of a table with the columns age, sex"):
        model.predict(np.zeros((2, 12)))
    with pytest.raises(UsageError, match="missing or infinite"):
        model.predict(np.full((1, 13), np.inf))
    (tmp_path / "x.csv").write_text("age,sex\n50,1\n")
    said = fedskew("predict", str(table_run), "--data", "x.csv")
    assert (said.code, len(said.err.splitlines())) == (2, 1)
    assert "x.csv has no column 'cp', which the model needs" in said.err
    with pytest.raises(UsageError, match="is a folder of images, but the model was not trained on images"):
        model.predict(tmp_path)


def test_a_client_is_chosen_by_number_or_name(table_run: Path) -> None:
    assert load(table_run, client="va").client == 3
    for wrong in ("zurich", "4", "-1", "../../3", "1e0"):
        with pytest.raises(UsageError, match="unknown client"):
            load(table_run, client=wrong)


def test_a_model_and_its_predictions_are_one_line_in_a_session(table_run: Path) -> None:
    model = load(table_run, client="va")
    assert repr(model).startswith("<TrainedModel: the model of client va (mlp:hidden=8); takes rows of a table")
    said = model.predict(np.full((500, 13), np.nan))
    assert repr(said) == f"<Predictions of 500 samples: 500 {said.classes[0]}>"


def test_an_export_names_the_client_as_the_user_does(table_run: Path, fedskew: Any) -> None:
    said = fedskew("export", str(table_run), "--client", "va", "--to", "va.safetensors")
    assert "wrote the model of client va (mlp:hidden=8) to va.safetensors" in " ".join(said.out.split())


# Broken and foreign directories.


def test_folders_that_hold_no_finished_run_are_one_sentence(tmp_path: Path, fedskew: Any) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "nowhere", "../../../../etc", "\0"):
        said = fedskew("predict", name, "--data", "digits")
        assert (said.code, len(said.err.splitlines())) == (2, 1), said.err
    started = Run(DIGITS, out=tmp_path / "run")
    next(iter(started))
    with pytest.raises(UsageError, match="is not finished: resume it with fedskew run --resume"):
        load(tmp_path / "run")


@pytest.mark.parametrize("harm", ["cut", "header", "changed", "other", "empty"])
def test_a_damaged_model_file_is_one_sentence(run: Path, tmp_path: Path, harm: str) -> None:
    path = shutil.copytree(run, tmp_path / "run")
    file = path / "model.safetensors"
    blob = bytearray(file.read_bytes())
    if harm == "changed":
        blob[-1] ^= 1
    new = {"cut": blob[:-7], "header": b"\xff" * 8 + blob[8:], "changed": blob, "empty": b""}.get(harm)
    if new is None:
        new = bytearray((SAVED / "simulated" / "model.safetensors").read_bytes())
    file.write_bytes(new)
    with pytest.raises(UsageError, match=r"model\.safetensors"):
        load(path)


def test_a_damaged_card_is_one_sentence(run: Path, tmp_path: Path) -> None:
    path = shutil.copytree(run, tmp_path / "run")
    card = json.loads((path / "model.json").read_text())
    (path / "model.json").write_text("{")
    with pytest.raises(UsageError, match=r"model\.json cannot be read"):
        load(path)
    (path / "model.json").write_text(json.dumps(card | {"net": "mlp:hidden=9"}))
    with pytest.raises(UsageError, match=r"the weights in .* do not fit its net mlp:hidden=9"):
        load(path)


def test_a_file_name_in_the_list_of_client_states_is_refused(tmp_path: Path) -> None:
    finished(tmp_path / "run", Experiment(method=fs.FedPer(), split="iid:clients=2", model="mlp:hidden=4", rounds=1))
    (tmp_path / "run" / "clients.jsonl").write_text('{"client": "../../../etc/passwd", "round": 0, "sha256": "x"}\n')
    with pytest.raises(UsageError, match="the state of client 1"):
        load(tmp_path / "run", client=1)


def test_a_run_of_an_earlier_version_is_used_with_its_data_or_says_what_it_lacks() -> None:
    model = load(SAVED / "simulated")
    recorded = json.loads((SAVED / "simulated" / "result.json").read_text())["metrics"]["global"]["accuracy"]
    assembled = assemble(fs.read_run(SAVED / "simulated").experiment)
    assert accuracy(model, assembled.data.x_test, assembled.data.y_test) == recorded
    with pytest.raises(UsageError, match=r"written by an earlier version and has no model\.json"):
        load(SAVED / "served")


def test_a_method_without_a_global_model_asks_for_a_client(tmp_path: Path) -> None:
    finished(tmp_path, Experiment(method=fs.Local(), split="iid:clients=2", model="mlp:hidden=4", rounds=1))
    with pytest.raises(UsageError, match="local has no global model: choose a client with --client or client=, 0 to 1"):
        load(tmp_path)


def test_an_export_to_an_unknown_format_or_place_is_one_sentence(run: Path, tmp_path: Path, fedskew: Any) -> None:
    for name, words in (("m.h5", "expected a file that ends in .pt"), ("no/m.safetensors", "cannot be written")):
        said = fedskew("export", str(run), "--to", name)
        assert (said.code, words in said.err) == (2, True), said.err
    assert fedskew("export", str(run), "--to", "m.safetensors", "--json").json()["classes"] == list("0123456789")


def test_onnx_without_its_package_is_one_sentence(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(UsageError, match=r"pip install 'fedskew\[onnx\]'"):
        fs.export(load(run), tmp_path / "m.onnx")
