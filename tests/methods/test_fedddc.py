"""FedDDC: Eqs. 2 to 23, its switches, what it keeps, and the ensemble that is tested."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, tensor
from torch.nn.functional import cross_entropy, one_hot
from torch.testing import assert_close

from fedskew.core.losses import decoupled, imitation
from fedskew.core.method import Method, mean_of, model_of
from fedskew.core.net import outputs
from fedskew.core.settings import build as settle
from fedskew.core.tensors import Payload, Tensors
from fedskew.core.training import Training
from fedskew.federation.loop import run
from fedskew.federation.protocol import Record
from fedskew.federation.simulate.simulation import Simulation
from fedskew.federation.wire import decode, digest, encode
from fedskew.methods import fedddc
from fedskew.methods._shared import distillation as distillation
from fedskew.methods._shared.distillation import (
    calibrate,
    mean_features,
    no_moments,
    on_server,
    predict,
    stack_models,
    train_model,
    train_student,
    unstack_models,
)
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.fedddc import ADAM, CALIBRATION, CLIENTS, TEAM, FedDDC, Inputs, confidence, ensembled, target_loss
from helpers.public import FEW, TAIL, after, arrived, server_site, small
from toys import digits, rounds, same

LOGITS = tensor([[[2, 0, -1], [0, 1, 0]], [[1, 0.5, 0], [-0.5, 0.5, 1]], [[0, 0, 0], [1, 3, -1]]]).double()
Y = tensor([0, 1])
TEACHER = tensor([[1.010299, -0.410299, 1.184884]]).double()
STUDENT, LAST = tensor([[0.3, 0.1, 0.9]]).double(), tensor([2])
ROWS: dict[str, dict[str, Any]] = {
    "a": {"dfl": "none", "ec": False, "led": False},
    "b": {"ec": False, "led": False},
    "c": {"dfl": "none", "led": False},
    "d": {"led": False},
    "e": {"ec": False},
    "f": {"dfl": "none"},
    "g": {},
    "h": {"dfl": "tlcr", "ec": False, "led": False},
    "i": {"dfl": "crb", "ec": False, "led": False},
}


# Eqs. 3 to 10: target-loss confidence


def test_confidence_on_numbers() -> None:
    """Client 1: CE (log(1 + e^-2 + e^-3) + log(1 + 2/e)) / 2 = (.169846 + .551445) / 2; R = 1.5 / .360645."""
    U, L = target_loss(LOGITS, Y, "literal")
    assert_close(U, tensor([1.5, 0.75, 1.5]).double())
    assert_close(L, tensor([0.360645, 0.892200, 0.620772]).double(), atol=1e-6, rtol=0)
    assert_close(U / L, tensor([4.159211, 0.840619, 2.416346]).double(), atol=1e-5, rtol=0)
    assert_close(confidence(U, L, "literal"), tensor([0.825612, 0.029890, 0.144497]).double(), atol=1e-6, rtol=0)
    for k in range(3):
        assert float(L[k]) == pytest.approx(float(cross_entropy(LOGITS[k], Y)))


def test_the_number_of_samples_cancels() -> None:
    """R = sum of target logits / sum of CE."""
    U, L = target_loss(LOGITS, Y, "literal")
    twice = target_loss(LOGITS.repeat(1, 2, 1), Y.repeat(2), "literal")
    assert_close((2 * U) / (2 * L), twice[0] / twice[1])


def test_a_large_confidence_is_one_hot_and_finite() -> None:
    Q = confidence(tensor([1000.0, 990.0, 0.0]).double(), torch.ones(3).double(), "literal")
    assert_close(Q, tensor([0.999955, 0.000045, 0.0]).double(), atol=1e-6, rtol=0)
    assert_close(confidence(tensor([1000.0, 990.0, 0.0]), torch.ones(3), "literal", 1e9), torch.full((3,), 1 / 3))


def test_with_negative_logits_only_the_signed_form_prefers_the_smaller_loss() -> None:
    """U = -4, CE (3, 6): literal R (-4/3, -2/3); signed R (-12, -24)."""
    U, L = tensor([-4.0, -4.0]).double(), tensor([3.0, 6.0]).double()
    assert_close(confidence(U, L, "literal"), tensor([0.339244, 0.660756]).double(), atol=1e-6, rtol=0)
    assert_close(confidence(U, L, "signed"), tensor([0.999994, 0.000006]).double(), atol=1e-6, rtol=0)
    assert_close(confidence(-U, L, "signed"), confidence(-U, L, "literal"))


def test_the_signed_form_does_not_see_a_shift_of_all_logits() -> None:
    """(1.5 + 5) / .360645 = 18.023; centred, the first client has U = (5/3 + 2/3) / 2."""
    shifted = target_loss(LOGITS + 5, Y, "literal")
    assert float(shifted[0][0] / shifted[1][0]) == pytest.approx(18.023, abs=1e-3)
    U, L = target_loss(LOGITS, Y, "signed")
    assert float(U[0]) == pytest.approx(7 / 6)
    assert_close(target_loss(LOGITS + 5, Y, "signed")[0], U)
    assert_close(L, target_loss(LOGITS, Y, "literal")[1])


def test_a_model_without_loss_has_a_finite_confidence() -> None:
    U, L = target_loss(tensor([[[1e4, 0.0]], [[0.0, 1e4]]]), tensor([0]), "literal")
    assert float(L[0]) == 1e-8
    assert confidence(U, L, "literal").tolist() == [1.0, 0.0]


def test_w_tl_is_the_mean_of_the_clients_models_by_confidence() -> None:
    _, _, sent = arrived()
    team = after(replace(FEW, **ROWS["h"]))
    z = torch.stack([predict(server_site(), model_of(u.payload)).logits for u in sent])
    Q = confidence(*target_loss(z, server_site().data.labels, "literal"), "literal")
    assert Q.max() - Q.min() > 0.01
    for group in ("parameters", "buffers"):
        for name, t in team[group].items():
            wanted = sum(q * u.payload[group][name].double() for q, u in zip(Q, sent, strict=True))
            assert_close(t.double(), wanted, atol=1e-6, rtol=1e-5)


def test_identical_clients_count_alike_whatever_their_samples() -> None:
    _, server, sent = arrived()
    clones = [replace(sent[0], weight=float(n)) for n in (1, 10, 100)]
    made = replace(FEW, **ROWS["h"]).aggregate(server_site(), server, iter(clones))
    assert_close(dict(made["parameters"]), dict(sent[0].payload["parameters"]))


# Eq. 11: re-balancing


def test_w_cr_is_fedavg_s_model_after_adam_on_d0() -> None:
    """I steps of torch's Adam over the same batches, by hand."""
    _, _, sent = arrived()
    world, site = arrived()[0], server_site()
    made = after(replace(FEW, **ROWS["i"]))
    again = server_site()
    again.load(mean_of(sent))
    batches: list[tuple[Tensor, Tensor]] = []

    def noted(net: Any, x: Tensor, y: Tensor) -> Tensor:
        batches.append((x.clone(), y))
        return cross_entropy(net(x), y)

    train_model(again, mean_of(sent), noted, on_server(again, optimiser="adam", lr=0.002, batch_size=8), 3)
    net = world.make_net()
    net.load_state_dict(mean_of(sent)["parameters"])
    adam = torch.optim.Adam(net.parameters(), lr=0.002, weight_decay=2e-4)
    for x, y in batches:
        adam.zero_grad()
        cross_entropy(net(x), y).backward()
        adam.step()
    assert [len(y) for _, y in batches] == [8, 8, 8]
    assert_close(dict(made["parameters"]), {n: p.detach() for n, p in net.named_parameters()}, atol=1e-6, rtol=1e-5)
    assert site.data.labels.bincount().tolist() == [4] * 10


def test_the_head_alone_can_be_rebalanced() -> None:
    _, _, sent = arrived()
    w_g = mean_of(sent)["parameters"]
    for scope, moved in (("head", {"head.weight", "head.bias"}), ("all", set(w_g))):
        made = after(replace(FEW, **ROWS["i"], crb_scope=scope))["parameters"]
        assert {name for name in w_g if not torch.equal(made[name], w_g[name])} == moved


# Eqs. 12 to 16: the calibrated ensemble

GATED = Tensors(a=tensor([1.0, 1.5, 2.0]), b=tensor([0.0, 0.1, -0.2]), v=tensor([0.4, -0.6]))
PARTS = Inputs(tensor([[2.0, -1.0, 0.5]]), tensor([[0.2, 0.4, 1.5]]), tensor([[1.0, 1.0]]))


def test_the_ensemble_on_numbers() -> None:
    """z_tl (2, -1.4, .8), z_cr (.2, .4, 1.5), g (1, 1): s = sigmoid(-.2) = .450166."""
    assert_close(ensembled(GATED, PARTS), TEACHER.float(), atol=1e-6, rtol=0)
    assert_close(ensembled(GATED | {"v": torch.zeros(2)}, PARTS), tensor([[1.1, -0.5, 1.15]]))
    assert_close(ensembled(GATED | {"v": torch.full((2,), 50.0)}, PARTS), tensor([[2.0, -1.4, 0.8]]))


def test_the_gate_uses_the_clients_mean_features_times_those_of_w_cr() -> None:
    """Client features (1, 2), (3, 0), f_cr (.5, 1): g = (2, 1) * (.5, 1) = (1, 1)."""
    predictions = [distillation.Predictions(tensor([f]), torch.empty(1, 0)) for f in ([1.0, 2.0], [3.0, 0.0])]
    assert (mean_features(predictions) * tensor([[0.5, 1.0]])).tolist() == [[1.0, 1.0]]
    _, _, sent = arrived()
    site, models = server_site(), [model_of(u.payload) for u in sent]
    inputs = FEW.inputs(site, models[0], models[1], [predict(site, m) for m in models])
    wanted = torch.stack([predict(site, m).features for m in models]).mean(0) * predict(site, models[1]).features
    assert_close(inputs.g, wanted)
    assert_close(inputs.z_tl, predict(site, models[0]).logits)
    assert_close(inputs.z_cr, predict(site, models[1]).logits)
    unit = replace(FEW, unit_gate=True).inputs(site, models[0], models[1], [predict(site, m) for m in models])
    assert_close(unit.g.norm(dim=1), torch.ones(40))


def test_at_first_the_ensemble_is_the_mean_of_the_two_and_agrees_with_their_sum() -> None:
    server = after(replace(FEW, led=False, I=0))
    site = server_site()
    z_tl, z_cr = (predict(site, m).logits for m in unstack_models(TEAM, server))
    z_ec = replace(FEW, led=False).ensemble(site, server)
    assert z_ec is not None
    assert_close(z_ec, (z_tl + z_cr) / 2)
    summed = replace(FEW, **ROWS["b"]).ensemble(site, server)
    assert summed is not None
    assert_close(summed, z_tl + z_cr)
    assert torch.equal(summed.argmax(1), z_ec.argmax(1))


def adam_by_hand(values: Tensors, targets: Tensor, lr: float, steps: int) -> Tensors:
    own = {name: t.clone().requires_grad_() for name, t in values.items()}
    adam = torch.optim.Adam(own.values(), lr=lr)
    for _ in range(steps):
        adam.zero_grad()
        ((own["a"] * targets).sum() - own["v"].sum() ** 3).backward()
        adam.step()
    return Tensors({name: t.detach() for name, t in own.items()})


def test_calibration_is_adam_that_continues_from_its_moments() -> None:
    """3 + 4 steps with the moments between them are 7 of torch's Adam; without them they are not."""
    start, targets = Tensors(a=tensor([1.0, 2.0]), v=tensor([0.5])), tensor([0.3, -0.7])

    def loss(c: Any, row: Tensor) -> Tensor:
        assert sorted(row.tolist()) == list(range(40))  # one batch is all of D0
        return (c["a"] * targets).sum() - c["v"].sum() ** 3

    before = Tensors({name: t.clone() for name, t in start.items()})
    first, moments = calibrate(server_site(), start, no_moments(start), loss, lr=0.1, batch=40, steps=3)
    held = Tensors({name: t.clone() for name, t in moments.items()})
    second, later = calibrate(server_site(), first, moments, loss, lr=0.1, batch=40, steps=4)
    assert_close(dict(second), dict(adam_by_hand(start, targets, 0.1, 7)))
    assert (float(moments["step"]), float(later["step"])) == (3.0, 7.0)
    anew, _ = calibrate(server_site(), first, no_moments(start), loss, lr=0.1, batch=40, steps=4)
    assert not torch.allclose(anew["v"], second["v"])
    assert same({"": start, "m": moments}, {"": before, "m": held})
    assert list(later) == list(no_moments(start))


def test_calibration_reads_batches_of_d0_and_lowers_the_loss_of_the_ensemble() -> None:
    method = replace(FEW, led=False, I=60)
    fresh, server, site = after(replace(method, I=0)), after(method), server_site()
    y = site.data.labels

    def loss_of(c: Tensors) -> float:
        z = method.ensemble(site, server | {CALIBRATION: c})
        assert z is not None
        return float(cross_entropy(z, y))

    assert loss_of(server[CALIBRATION]) < loss_of(fresh[CALIBRATION])
    rows: list[Tensor] = []

    def noted(c: Any, row: Tensor) -> Tensor:
        rows.append(row)
        return c["a"].sum()

    calibrate(site, server[CALIBRATION], server[ADAM], noted, lr=0.1, batch=16, steps=3)
    assert [len(row) for row in rows] == [16, 16, 8]
    assert sorted(torch.cat(rows).tolist()) == list(range(40))


def test_calibration_is_kept_between_rounds_with_its_moments() -> None:
    records, _ = rounds(small(FEW), 2)
    one, two = (record.server for record in records)
    assert [float(r[ADAM]["step"]) for r in (one, two)] == [3.0, 6.0]
    for name in ("a", "b", "v"):
        assert not torch.equal(one[CALIBRATION][name], two[CALIBRATION][name])
    start = FEW.init_server(server_site())[CALIBRATION]
    assert (start["a"].tolist(), start["b"].tolist(), start["v"].tolist()) == ([1.0] * 10, [0.0] * 10, [0.0] * 12)


def test_the_calibration_stage_leaves_every_model_as_it_was() -> None:
    """w_tl and w_cr are the same with and without it, the clients' models are those that came."""
    _, _, sent = arrived()
    plain, calibrated = (after(replace(FEW, **ROWS[row])) for row in "bd")
    for a, b in zip(unstack_models(TEAM, plain), unstack_models(TEAM, calibrated), strict=True):
        assert same(a, b)
    for update, model in zip(sent, unstack_models(CLIENTS, calibrated), strict=True):
        assert same(model_of(update.payload), model)
    assert f"{CLIENTS}.parameters" not in plain


# Eqs. 17 to 23: distillation


def test_the_lesson_on_numbers() -> None:
    """CE .692217, TCKD .000238, NCKD .144273: L = (.692217 + .000238 + 2 * .144273) / 2; KD = .073882."""
    method = FedDDC()
    assert float(method.distillation_loss(STUDENT, TEACHER, LAST)) == pytest.approx(0.490501, abs=1e-6)
    traditional = replace(method, kd="traditional")
    assert float(traditional.distillation_loss(STUDENT, TEACHER, LAST)) == pytest.approx(0.383049, abs=1e-6)
    target, others = (float(t) for t in decoupled(STUDENT, TEACHER, LAST))
    assert (target, others) == pytest.approx((0.000238, 0.144273), abs=1e-6)
    p = float(TEACHER.softmax(1)[0, 2])
    assert p == pytest.approx(0.489554, abs=1e-6)
    assert float(imitation(STUDENT, TEACHER)) == pytest.approx(target + (1 - p) * others)
    assert float(replace(method, lam=0.0).distillation_loss(STUDENT, TEACHER, LAST)) == pytest.approx(
        0.288785, abs=1e-6
    )
    weighted = replace(method, lam=0.0, alpha=3.0, beta=0.5)
    assert float(weighted.distillation_loss(STUDENT, TEACHER, LAST)) == pytest.approx(3 * target + 0.5 * others)


@pytest.mark.parametrize("kd", ["dkd", "traditional"])
def test_a_temperature_divides_logits_and_keeps_the_size_of_gradients(kd: Any) -> None:
    method = FedDDC(lam=0.0, kd=kd)
    hot = float(replace(method, T=2.0).distillation_loss(STUDENT, TEACHER, LAST))
    assert hot == pytest.approx(4 * float(method.distillation_loss(STUDENT / 2, TEACHER / 2, LAST)))


@pytest.mark.parametrize("kd", ["dkd", "traditional"])
def test_a_student_that_agrees_with_the_teacher_learns_from_labels_alone(kd: Any) -> None:
    method = FedDDC(kd=kd)
    assert float(method.distillation_loss(TEACHER, TEACHER, LAST)) == pytest.approx(
        0.5 * float(cross_entropy(TEACHER, LAST))
    )


@pytest.mark.parametrize("kd", ["dkd", "traditional"])
def test_large_logits_stay_finite(kd: Any) -> None:
    student = tensor([[1e4, -1e4, 0.0], [0.0, 3e4, -3e4]], requires_grad=True)
    teacher, y = tensor([[-2e4, 2e4, 0.0], [3e4, 0.0, -3e4]]), tensor([0, 2])
    loss = FedDDC(kd=kd).distillation_loss(student, teacher, y)
    loss.backward()
    assert loss.isfinite()
    assert student.grad is not None
    assert student.grad.isfinite().all()
    assert ensembled(GATED, Inputs(*(1e6 * t for t in PARTS))).isfinite().all()
    assert confidence(*target_loss(1e30 * LOGITS, Y, "literal"), "literal").isfinite().all()


def test_every_sample_learns_from_its_own_row_of_the_teacher() -> None:
    site = server_site()
    shuffled = replace(site, data=site.data.part(torch.randperm(40, generator=torch.Generator().manual_seed(1))))
    teacher = torch.cat([one_hot(shuffled.data.labels, 10).float(), torch.arange(40.0)[:, None]], 1)
    met: list[Tensor] = []

    def distillation_loss(student: Tensor, known: Tensor, y: Tensor) -> Tensor:
        assert torch.equal(known[:, :10].argmax(1), y)
        met.append(known[:, 10])
        return cross_entropy(student, y)

    training = on_server(shuffled, lr=0.1, batch_size=16)
    made = train_student(shuffled, arrived()[1], teacher, distillation_loss, training, 3)
    assert sorted(torch.cat(met).tolist()) == list(range(40))
    plain = replace(shuffled, rng=server_site().rng)
    assert same(made, train_model(plain, arrived()[1], plain.loss, training, 3))


def test_the_student_starts_at_fedavg_s_model_and_takes_j_steps() -> None:
    """With SGD's place taken by Adam at lr r, the first step moves no parameter by more than r."""
    _, _, sent = arrived()
    w_g = mean_of(sent)["parameters"]
    one = after(replace(FEW, J=1, weight_decay=0.0))["parameters"]
    apart = torch.cat([(one[n] - w_g[n]).abs().flatten() for n in w_g])
    assert 0.0019 < float(apart.max()) <= 0.002 * 1.001


# Variants


@pytest.fixture(scope="module")
def servers() -> dict[str, Payload]:
    return {row: after(replace(FEW, **settings)) for row, settings in ROWS.items()}


def test_without_switches_and_without_steps_it_is_fedavg(servers: dict[str, Payload]) -> None:
    wanted = digest(mean_of(arrived()[2]))
    for server in (servers["a"], servers["b"], servers["c"], servers["d"], after(replace(FEW, J=0))):
        assert digest(model_of(server)) == wanted
    for row in "efghi":
        assert digest(model_of(servers[row])) != wanted


@pytest.mark.slow  # trains for seconds
def test_no_two_rows_are_the_same(servers: dict[str, Payload]) -> None:
    assert len({digest(server) for server in servers.values()}) == len(ROWS)


def test_the_teacher_without_calibration_is_the_sum_of_what_dfl_makes() -> None:
    z = Inputs(tensor([[1.0, 2.0]]), tensor([[10.0, 20.0]]), torch.empty(0))
    wanted = {"both": [11.0, 22.0], "tlcr": [1.0, 2.0], "crb": [10.0, 20.0], "none": [10.0, 20.0]}
    for dfl, sums in wanted.items():
        assert replace(FEW, ec=False, dfl=dfl).combined(z, {}).tolist() == [sums]


def test_a_model_that_dfl_does_not_make_is_fedavg_s() -> None:
    w_g = mean_of(arrived()[2])
    both = unstack_models(TEAM, after(replace(FEW, led=False)))
    for dfl, own in (("none", set()), ("tlcr", {0}), ("crb", {1})):
        team = unstack_models(TEAM, after(replace(FEW, led=False, dfl=dfl)))
        assert {k for k in (0, 1) if not same(team[k], w_g)} == own
        assert all(same(team[k], both[k]) for k in own)


def test_lambda_1_is_fine_tuning_on_d0_whatever_the_teacher() -> None:
    site = server_site()
    training = on_server(site, optimiser="adam", lr=0.002, weight_decay=2e-4, batch_size=16)
    wanted = train_model(site, mean_of(arrived()[2]), site.loss, training, 2)
    for settings in ({}, {"dfl": "none", "ec": False}, {"kd": "traditional"}, {"dfl": "tlcr", "tlcr": "signed"}):
        assert same(model_of(after(replace(FEW, lam=1.0, **settings))), wanted)
    assert not same(model_of(after(FEW)), wanted)


def test_frozen_models_see_d0_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three clients, w_tl and w_cr; TLCR alone needs the clients, cRB alone none."""
    seen: list[Payload] = []
    for module in (fedddc, distillation):
        monkeypatch.setattr(module, "predict", lambda site, model: seen.append(model) or predict(site, model))
    for settings, passes in (({}, 5), (ROWS["h"], 3), (ROWS["i"], 0), ({"lam": 1.0}, 0), ({"J": 0}, 0)):
        seen.clear()
        after(replace(FEW, **settings))
        assert len(seen) == passes


def test_traffic_is_fedavg_s() -> None:
    plain, _ = rounds(small(FedAvg()), 1)
    for settings in ({}, {"led": False}):
        ours, _ = rounds(small(replace(FEW, **settings)), 1)
        assert (ours[0].bytes_up, ours[0].bytes_down) == (plain[0].bytes_up, plain[0].bytes_down)


# The ensemble, tested


def judged(method: Method, workers: int = 1, **options: Any) -> Record:
    world = small(method, **options)
    with Simulation(world, workers=workers) as simulation:
        loop = run(method, simulation, simulation.world.server_site, 2, lambda round: [[0, 2, 4], [1, 3]][round])
        *_, record = loop
    return record


@pytest.mark.parametrize("row", ROWS)
def test_without_distillation_the_ensemble_is_evaluated(row: str) -> None:
    """What is reported is the accuracy, by hand, of its logits on the test set."""
    method = replace(FEW, **ROWS[row])
    record = judged(method)
    assert record.metrics is not None
    assert (record.metrics.ensemble is not None) == (row in "bcd")
    if row in "bcd":
        world = small(method)
        site = world.server_site(1, "evaluate")
        assert torch.equal(site.data.labels, world.y_test)
        logits = method.ensemble(site, decode(encode(record.server)))
        assert logits is not None
        accuracy = float((logits.argmax(1) == world.y_test).float().mean())
        assert record.metrics.ensemble.accuracy == pytest.approx(accuracy)
        assert record.metrics.ensemble.loss == pytest.approx(float(cross_entropy(logits, world.y_test)))
        assert len(record.metrics.ensemble.per_class) == 10


def test_the_ensemble_of_a_round_is_eqs_12_to_16_on_its_models() -> None:
    """By hand from what the server keeps; a large v, so that the gate differs from sample to sample."""
    _, _, sent = arrived()
    method, world = replace(FEW, led=False), arrived()[0]
    server = after(method)
    c = Tensors({name: t + 0.5 for name, t in server[CALIBRATION].items()})
    site = world.server_site(0, "evaluate")
    found = method.ensemble(site, server | {CALIBRATION: c})
    f_k = torch.stack([predict(site, model_of(u.payload)).features for u in sent]).mean(0)
    tl, cr = (predict(site, m) for m in unstack_models(TEAM, server))
    s = torch.sigmoid((f_k * cr.features * c["v"]).sum(1))[:, None]
    assert float(s.max() - s.min()) > 0.1
    assert found is not None
    assert_close(found, s * (c["a"] * tl.logits + c["b"]) + (1 - s) * cr.logits)


@pytest.mark.slow  # two worker processes
@pytest.mark.usefixtures("quick_workers")
def test_the_ensemble_has_the_same_figures_for_any_number_of_workers() -> None:
    alone, two = (judged(replace(FEW, led=False), workers) for workers in (1, 2))
    assert alone.metrics == two.metrics
    assert digest(alone.server) == digest(two.server)


def test_without_a_test_set_there_is_no_ensemble_to_test() -> None:
    world = small(replace(FEW, led=False))
    world = replace(world, x_test=world.x_test[:0], y_test=world.y_test[:0])
    *_, record = run(world.method, Simulation(world), world.server_site, 1, lambda round: [0, 2])
    assert record.metrics is not None
    assert record.metrics.global_ is None
    assert record.metrics.ensemble is None


# What frozen models say, and how models train on the server


def test_a_phase_on_the_server_augments_and_treats_batch_norm_as_the_clients_do() -> None:
    clients = Training(lr=0.3, momentum=0.9, weight_decay=0.1, clip=1.0, augment="flip", batch_norm="frozen", epochs=7)
    site = replace(server_site(), training=clients)
    made = on_server(site, optimiser="adam", lr=0.002, batch_size=9)
    assert made == Training("adam", 0.002, batch_size=9, augment="flip", batch_norm="frozen")


@pytest.mark.slow  # trains for seconds
def test_statistics_that_stay_with_the_clients_stay_out_of_the_server_s_model() -> None:
    few = Training(lr=0.1, batch_size=8, steps=1, batch_norm="local")
    for row in "gdhi":
        world = digits(replace(FEW, **ROWS[row]), model="resnet8", training=few, split=TAIL)
        (record,), _ = rounds(world, 1, cohorts=[[0, 1]])
        assert not [group for group in record.server if "buffers" in group]


def test_models_are_kept_and_restored_bit_for_bit() -> None:
    models = [model_of(u.payload) for u in arrived()[2]]
    for a, b in zip(unstack_models("x", decode(encode(stack_models("x", models)))), models, strict=True):
        assert same(a, b)


@pytest.mark.parametrize("policy", ["aggregate", "local", "frozen"])
def test_a_view_is_the_model_in_evaluation_mode_and_moves_nothing(policy: Any) -> None:
    """Without statistics of its own a model goes by the batch's, as where it is tested."""
    few = Training(lr=0.1, batch_size=8, steps=1, batch_norm=policy)
    world = digits(FEW, model="resnet8", training=few, split=TAIL)
    records, _ = rounds(world, 1, cohorts=[[0, 1]])
    model, site = model_of(records[0].server), world.server_site(1, "train")
    assert ("buffers" in model) == (policy == "aggregate")
    said = predict(site, model)
    x, _ = site.data.take(torch.arange(40))
    net = world.make_net()
    net.load_state_dict(world.initial["buffers"], strict=False)
    net.load_state_dict({name: t for ts in model.values() for name, t in ts.items()}, strict=False)
    with torch.no_grad():
        wanted = outputs(net, net, x, batch_statistics=policy == "local")
        assert_close(said.logits, wanted)
        assert_close(said.logits, net.head(said.features))
        assert torch.allclose(wanted, outputs(net, net, x, batch_statistics=False)) == (policy != "local")
    assert all(torch.equal(net.get_buffer(n), t) for n, t in site.buffers().items())


def test_a_view_of_one_sample_goes_by_the_batch_too() -> None:
    few = Training(lr=0.1, batch_size=8, steps=1, batch_norm="local")
    site = digits(FEW, model="resnet8", training=few, split=TAIL).server_site(0, "train")
    lone = replace(site, data=site.data.part(tensor([3])))
    assert predict(lone, {}).logits.isfinite().all()


# As a whole

ON: dict[str, dict[str, Any]] = {
    "dfl": {"dfl": "tlcr"},
    "ec": {"ec": False},
    "led": {"led": False},
    "tlcr": {"tlcr": "signed"},
    "tlcr_temp": {"tlcr_temp": 0.1},
    "crb_scope": {"crb_scope": "head"},
    "unit_gate": {"unit_gate": True},
    "kd": {"kd": "traditional"},
    "lam": {"lam": 0.2},
    "alpha": {"alpha": 9.0},
    "beta": {"beta": 0.0},
    "T": {"T": 3.0},
    "I": {"I": 1},
    "J": {"J": 1},
    "lr": {"lr": 0.01},
    "weight_decay": {"weight_decay": 1.0},
    "batch": {"batch": 40},
    "led_batch": {"led_batch": 5},
}


@pytest.mark.parametrize("name", ON)
def test_every_setting_changes_the_result_and_works_with_partial_participation(name: str) -> None:
    method = settle(FedDDC, {f.name: str(getattr(FEW, f.name)) for f in fields(FedDDC)} | ON[name], "fedddc")
    assert method == replace(FEW, **ON[name])
    assert digest(after(method)) != digest(after(FEW))
    some, _ = rounds(small(method), 2, cohorts=[[3], [0, 2]])
    for tensors in some[-1].server.values():
        assert all(t.isfinite().all() for t in tensors.values() if t.is_floating_point())


def test_all_settings_are_tried() -> None:
    assert set(ON) == {field.name for field in fields(FedDDC)}


@pytest.mark.slow  # trains for seconds
def test_it_learns_classes_that_the_clients_hardly_have() -> None:
    """A tail of digits over five clients: the server's forty samples make the difference."""
    split = "public:per_class=4+longtail:factor=10+dirichlet:alpha=0.3,clients=5,min=3"
    training = Training(lr=0.1, batch_size=16, epochs=2)
    accuracy = {}
    for method in (FedAvg(), FedDDC(lr=0.01)):
        world = digits(method, split=split, training=training, count=5)
        records, simulation = rounds(world, 5)
        metrics = simulation.evaluate(4, method.broadcast(records[-1].server))
        accuracy[type(method).__name__] = metrics.global_
    assert accuracy["FedDDC"].accuracy > accuracy["FedAvg"].accuracy + 0.1
    assert accuracy["FedDDC"].tail > accuracy["FedAvg"].tail + 0.3
