"""Laws about what leaves a client: it can be sent, holds no samples, and gives the server no more than it declares.

See laws.py for what a law is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedskew.core.method import Method
from fedskew.core.site import Site
from fedskew.core.tensors import Payload, Tensors
from fedskew.federation.wire import decode, encode, layout_of
from fedskew.studies.subject import ROUNDS, Subject, equal, one_round

SAMPLES = 20  # of each client that are looked for in its updates
LABELS = 8  # of each client, in order, that are looked for


def payloads_can_be_sent(subject: Subject) -> str:
    """What it sends and keeps survives the wire, models have the net's types, and all updates have one layout."""
    world = subject.world()
    server, states = world.method.init_server(world.server_site(0, "init")), dict[int, Payload]()
    layouts = set()
    for round in range(ROUNDS):
        server, updates = one_round(world, server, states, round)
        for what, payload in (("the update", updates[0].payload), ("the server's model", server)):
            for name, parameter in world.net.named_parameters():
                found = payload.get("parameters", {}).get(name, parameter)
                if (found.dtype, found.shape) != (parameter.dtype, parameter.shape):
                    given, wanted = (f"{t.dtype} {list(t.shape)}" for t in (found, parameter))
                    return f"{what} has {name} as {given}, the net has {wanted}"
        for payload in (server, world.method.broadcast(server), *states.values(), *(u.payload for u in updates)):
            if not equal(payload, decode(encode(payload))):
                return "a payload is not the same after it was sent"
        layouts |= {layout_of(u.payload) for u in updates}
    return "" if len(layouts) == 1 else "updates of different clients or rounds have different groups, names or shapes"


def sends_no_samples(subject: Subject) -> str:
    """Updates contain none of a client's samples, and not its labels in order.

    What is changed before it is sent, such as a sample times 2, is not found.
    """
    world = subject.world()
    method = world.method
    server = method.init_server(world.server_site(0, "init"))
    for client in range(world.population):
        site = world.site(client, 0, "train")
        secrets = dict(_secrets(site))
        update, _ = method.client(site, method.broadcast(server), {})
        for group, tensors in update.payload.items():
            for name, tensor in tensors.items():
                blob = _bytes(tensor)
                if found := [what for secret, what in secrets.items() if secret in blob]:
                    return f"{group}/{name} of an update contains {found[0]}: they must not leave the client"
    return ""


def has_own_seed(method: Method) -> bool:
    """Whether a setting of the method is a seed, for what all clients must draw alike."""
    return any("seed" in field.name for field in dataclasses.fields(method))


def _secrets(site: Site) -> Iterator[tuple[bytes, str]]:
    """Bytes that must not be in an update, and what they are. What could be there by chance is left out."""
    data = site.data
    count = min(SAMPLES, len(data))
    x, y = data.take(torch.arange(count))
    for sample in (*x, *data.x[data.index[:count]]):
        if len(set(sample.flatten().tolist())) > 2:
            yield _bytes(sample), "samples of the client"
    if len(set(y[:LABELS].tolist())) > 2:
        for labels in (y[:LABELS], y[:LABELS].float()):
            yield _bytes(labels), "labels of the client's samples"


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def ignores_who_it_is(subject: Subject) -> str | None:
    """A client's update does not depend on its number.

    Not asked of a method with a seed of its own, by which clients may draw who does what.
    """
    if has_own_seed(subject.method):
        return None
    world = subject.world()
    method = world.method
    broadcast = method.broadcast(method.init_server(world.server_site(0, "init")))
    made = []
    for number in (1, 3):
        site = dataclasses.replace(world.site(1, 0, "train"), client=number)
        made.append(method.client(site, broadcast, {})[0])
    if equal(made[0].payload, made[1].payload) and made[0].weight == made[1].weight:
        return ""
    return "an update depends on `site.client`, a number that says nothing about the data and is another one elsewhere"


def server_needs_only_sums(subject: Subject, *, declared: bool | None = None) -> str | None:
    """If it declares `sums_only`, its server learns nothing from a client that a sum over clients would not tell.

    Every entry of every tensor is permuted among clients of equal weight, so that no client's own tensor survives but
    all sums do: the server's next state must be the same bit for bit. Values are rounded before: sums are exact then.
    `declared` takes the place of the method's declaration; None: as the method says.
    """
    if not (subject.method.sums_only if declared is None else declared):
        return None
    world = subject.world()
    method, states = world.method, dict[int, Payload]()
    server, rng = method.init_server(world.server_site(0, "init")), torch.Generator().manual_seed(0)
    for round, stage in enumerate(dict.fromkeys(method.stages(ROUNDS))):
        server, updates = one_round(world, server, states, round, stage)
        plain = [dataclasses.replace(update, weight=1.0, payload=_rounded(update.payload)) for update in updates]
        mixed = _permuted([update.payload for update in plain], rng)
        others = [dataclasses.replace(update, payload=payload) for update, payload in zip(plain, mixed, strict=True)]
        a, again, b, turned = (
            method.aggregate(world.server_site(round, stage), server, iter(sent))
            for sent in (plain, plain, others, plain[::-1])
        )
        if not equal(a, again):
            return "`aggregate` gives two results for the same updates"
        if not equal(a, turned, tolerance=1e-4):
            return "the server's state depends on the order of the updates"
        if not equal(a, b):
            return "the server's state depends on single clients' tensors: declare sums_only = False"
    return ""


def _rounded(payload: Payload) -> Payload:
    """Floating-point values as multiples of 1/256; counts of samples, by which others are weighted, as ones."""

    def value(name: str, t: torch.Tensor) -> torch.Tensor:
        if not t.is_floating_point():
            return t
        return torch.ones_like(t) if name == "count" else (t * 256).round() / 256

    return {group: Tensors({name: value(name, t) for name, t in ts.items()}) for group, ts in payload.items()}


def _permuted(payloads: Sequence[Payload], rng: torch.Generator) -> list[Payload]:
    """The payloads with each entry of each tensor permuted among them."""
    made: list[Payload] = [{group: Tensors(tensors) for group, tensors in payload.items()} for payload in payloads]
    for group, tensors in payloads[0].items():
        for name in tensors:
            stacked = torch.stack([payload[group][name] for payload in payloads])
            order = torch.rand(stacked.shape, generator=rng).argsort(0)
            for payload, t in zip(made, stacked.gather(0, order), strict=True):
                payload[group][name] = t
    return made
