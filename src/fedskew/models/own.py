"""A user's own net: a torch module, `my.py:name`, or one of an installed package (entry point `fedskew.models`).

What a file or package names is a function (shape, classes) -> nn.Module, a module's class called in the same way, or
a module. `shape` is that of one input without the batch. Options of the text form are further keyword arguments.
"""

from __future__ import annotations

import ast
import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from fedskew.core import user_code
from fedskew.core.net import Net, Shape
from fedskew.core.settings import UsageError, parse
from fedskew.models.net import wrap
from fedskew.models.quick import TOLERANCE, outputs_of, probe

GROUP = "fedskew.models"


def own_net_text(text: str) -> tuple[str, dict[str, Any]] | None:
    """(name, options) if a model's text names a user's net, None if it is one of ours or unknown.

    >>> own_net_text("my.py:net:width=8,act=relu")
    ('my.py:net', {'width': 8, 'act': 'relu'})
    >>> own_net_text("mlp:hidden=16")
    """
    found = user_code.split_text(text)
    if found is None:
        name, _, options = text.partition(":")
        if name.strip() not in user_code.installed(GROUP):
            return None
        found = name.strip(), options
    name, rest = found
    options_of = parse(f"own:{rest}", "model")[0][1] if rest else {}
    return name, {key: plain_value(value) for key, value in options_of.items()}


def plain_value(text: str) -> Any:
    """The number, boolean or text that an option's text stands for."""
    try:
        return ast.literal_eval({"true": "True", "false": "False"}.get(text.lower(), text))
    except (ValueError, SyntaxError):
        return text


def build_own(name: str, shape: Shape, classes: int, *, seed: int, head: str = "", **options: Any) -> Net:
    """Build a user's net by name. `head` names its last layer; "" finds it. `seed` decides its initial values."""
    made: Any
    if user_code.split_text(name) is not None:
        made = user_code.from_file(name, "model")
    else:
        made = user_code.from_package(user_code.installed(GROUP)[name], "model")
    if not isinstance(made, nn.Module):
        made = called(made, name, shape, classes, seed, options)
    elif options:
        raise UsageError(f"model '{name}' is a module, which takes no options, got {', '.join(options)}.")
    if not isinstance(made, nn.Module):
        raise UsageError(f"model '{name}' gives a {type(made).__name__}: expected a torch.nn.Module.")
    return made if isinstance(made, Net) else wrapped(made, head, shape, classes)


def wrapped(module: nn.Module, head: str, shape: Shape, classes: int) -> Net:
    """A `Net` that computes what a user's module does. `head` names its last layer; "" finds it.

    UsageError if that is impossible: a softmax after the last layer would become a part of the body, before the head.
    """
    if any(isinstance(p, nn.UninitializedParameter) for p in module.parameters()):
        raise UsageError("the model has lazy layers, whose sizes are not known: expected layers with all sizes given.")
    is_meta = any(p.is_meta for p in module.parameters())  # without values, to see how large it is
    head = head or find_head(module, classes, None if is_meta else shape)
    net = wrap(module, head)
    wanted = None if is_meta else outputs_of(module, probe(shape))
    if wanted is not None and wanted.isfinite().all() and not _close(outputs_of(net, probe(shape)), wanted):
        raise UsageError(
            f"the model's output is not that of its layer '{head}': expected a net that ends with this layer; "
            "leave out a softmax or anything else that follows it (losses take logits), or name another head."
        )
    return net


def _close(found: Tensor | None, wanted: Tensor) -> bool:
    """Whether outputs are the same but for rounding."""
    if found is None or found.shape != wanted.shape:
        return False
    return bool((found - wanted).abs().max() <= TOLERANCE * wanted.abs().max())


def called(maker: Any, name: str, shape: Shape, classes: int, seed: int, options: dict[str, Any]) -> Any:
    """What a user's function or class gives for (shape, classes), with torch's generator seeded."""
    if not callable(maker):
        raise UsageError(f"model '{name}' is a {type(maker).__name__}: expected a module or a function.")
    try:
        inspect.signature(maker).bind(shape, classes, **options)
    except TypeError as error:
        given = ", ".join(["shape", "classes", *options])
        raise UsageError(f"model '{name}' cannot be called with ({given}): {error}.") from None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            return maker(shape, classes, **options)
        except Exception as error:  # the function is the user's: it may raise anything
            problem = str(error).strip().partition("\n")[0].rstrip(".")
            raise UsageError(f"model '{name}' failed for shape {shape}: {type(error).__name__}: {problem}.") from error


def find_head(module: nn.Module, classes: int, shape: Shape | None = None) -> str:
    """The name of the module's last Linear layer, which must have an output for each class.

    Last is the one whose output is the module's, for inputs of `shape`; without such a layer, or a shape, the last one
    that is listed.
    """
    name = "" if shape is None else last_called(module, shape)
    layer = module.get_submodule(name) if name else None
    if isinstance(layer, nn.Linear) and layer.out_features >= classes:
        return name
    linear: list[tuple[str, nn.Linear]] = [
        (name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Linear)
    ]
    if linear and linear[-1][0] and linear[-1][1].out_features >= classes:
        return linear[-1][0]
    known = ", ".join(f"{name or 'itself'} ({layer.out_features} outputs)" for name, layer in linear) or "none"
    raise UsageError(
        f"the model's last Linear layer is not one with {classes} outputs, one for each class; name its head. "
        f"Linear layers: {known}."
    )


def last_called(module: nn.Module, shape: Shape) -> str:
    """The name of the Linear layer that computes the module's output; "" if there is none, or the module fails."""
    copied, made = copy.deepcopy(module), dict[str, Any]()
    for name, layer in copied.named_modules():
        if name and isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda layer, inputs, output, name=name: made.update({name: output}))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            output = copied.eval()(probe(shape))
    except Exception:  # the net is the user's: it may raise anything; `check_outputs` reports what it does
        return ""
    return next((name for name, found in made.items() if found is output), "")
