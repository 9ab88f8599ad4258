"""How much a prototype reveals about the images it was computed from: the study of FedPG's Fig. 8, with numbers.

    python scripts/fedpg_privacy.py                                    # digits, half a minute
    python scripts/fedpg_privacy.py --data fmnist --samples 3000       # a minute

The attacker knows the extractor and has images of the same kind (the training part). For means of k = 1, 3 and 20
features of one class it trains a decoder that reconstructs an image from the mean, and applies it to means over
images it has not seen (the test part). PSNR and SSIM compare the reconstruction with every image that contributed to
the mean. The baseline is the mean image of the class, which needs no prototype: if both have the same values, a
prototype of k features reveals no more than the class. Also printed: how often the reconstruction is closer to a
contributing image than to another image of the class (50 % is chance).
The paper has a SqueezeNet, k = 1 and 3, one picture and no numbers; here the decoder has three linear layers.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, mse_loss

from fedskew.core.fit import fit
from fedskew.core.samples import Data
from fedskew.core.seeding import one_thread, seeded
from fedskew.core.settings import UsageError
from fedskew.core.site import Site
from fedskew.core.training import Training
from fedskew.experiment.assemble import assemble
from fedskew.experiment.config import Experiment
from fedskew.methods._shared.prototypes import class_means
from fedskew.models.net import dense

MEANS = (1, 3, 20)  # features per prototype; FedPG's clients send means of 20
SHOWN = 8  # images per row of the figure


class Side(NamedTuple):
    """The data of the attacker or of the clients: images in [0, 1], their features and labels."""

    images: Tensor  # [n, c, h, w]
    z: Tensor  # [n, d]
    y: Tensor


class Groups(NamedTuple):
    """Groups of k samples, each of one class."""

    members: Tensor  # [groups, k], indices of samples
    others: Tensor  # [groups, k], further samples of the same class; some may be members
    y: Tensor  # [groups]


def grouped(side: Side, k: int, count: int, rng: torch.Generator) -> Groups:
    """`count` random groups of k different samples of one class, from the classes with at least k samples."""
    large = (torch.bincount(side.y) >= k)[side.y]
    y = side.y[large][torch.randint(int(large.sum()), (count,), generator=rng)]
    chances = torch.rand(2, count, len(side.y), generator=rng).masked_fill(side.y != y[:, None], -1.0)
    members, others = chances.topk(k, dim=2).indices
    return Groups(members, others, y)


def trained_decoder(site: Site, side: Side, k: int, samples: int, epochs: int) -> nn.Module:
    """A decoder from a mean of k features to an image, trained with the squared error to the contributing images."""
    shape = side.images.shape[1:]
    groups = grouped(side, k, samples, site.rng)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = dense((side.z.shape[1], 512, 512, shape.numel()), last_relu=False)
        decoder = nn.Sequential(layers, nn.Sigmoid(), nn.Unflatten(1, shape))

    def loss(net: nn.Module, z: Tensor, group: Tensor) -> Tensor:
        chosen = torch.randint(k, (len(group),), generator=site.rng)
        return mse_loss(net(z), side.images[groups.members[group, chosen]])

    data = Data(side.z[groups.members].mean(1), torch.arange(samples), torch.arange(samples))
    training = Training("adam", lr=1e-3, batch_size=64, epochs=epochs)
    fit(replace(site, net=decoder, data=data, training=training), loss)
    return decoder.eval().requires_grad_(False)


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of images in [0, 1] in dB, one value per image."""
    return -10 * (a - b).square().flatten(1).mean(1).clamp(min=1e-10).log10()


def ssim(a: Tensor, b: Tensor, window: int = 7) -> Tensor:
    """Structural similarity (Wang et al. 2004) with a uniform window, one value per image."""
    mean_a, mean_b = avg_pool2d(a, window, 1), avg_pool2d(b, window, 1)
    var_a, var_b = avg_pool2d(a * a, window, 1) - mean_a**2, avg_pool2d(b * b, window, 1) - mean_b**2
    both = avg_pool2d(a * b, window, 1) - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2
    alike = (2 * mean_a * mean_b + c1) * (2 * both + c2) / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
    return alike.flatten(1).mean(1)


def against(rebuilt: Tensor, side: Side, members: Tensor) -> tuple[Tensor, Tensor]:
    """PSNR and SSIM of each reconstruction with every image of its group, [groups, k] each."""
    k = members.shape[1]
    real, made = side.images[members.flatten()], rebuilt.repeat_interleave(k, 0)
    return psnr(made, real).view(-1, k), ssim(made, real).view(-1, k)


def side_of(site: Site, body: nn.Module, data: Data) -> Side:
    """The images and features of some samples."""
    return Side(data.x[data.index].permute(0, 3, 1, 2) / 255, site.infer(body, data), data.labels)


def sides(given: argparse.Namespace) -> tuple[Site, Side, Side]:
    """(site with an extractor trained on all training data, data of the attacker, data of the clients)."""
    training = Training(lr=0.05, momentum=0.9, batch_size=64, epochs=given.epochs)
    keep = f"sample:keep={given.samples}+" if given.samples else ""
    experiment = Experiment(data=given.data, split=f"{keep}iid:clients=1", model=given.model, seed=given.seed)
    world = assemble(replace(experiment, training=training, holdout=replace(experiment.holdout, test=0.0))).world
    site = world.site(0, 0, "train")
    if site.data.x.dtype != torch.uint8:
        raise UsageError(f"--data {given.data} is invalid: expected a data set of images, such as digits or fmnist.")
    site.load()
    fit(site, site.loss)
    body = site.frozen(site.model()).body
    unseen = Data(world.x_test, world.y_test, torch.arange(min(1000, len(world.y_test))), world.mean, world.std)
    return site, side_of(site, body, site.data), side_of(site, body, unseen)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", default="digits")
    parser.add_argument("--samples", type=int, default=0, help="training samples to use; 0: all")
    parser.add_argument("--model", default="auto")
    parser.add_argument("--epochs", type=int, default=10, help="epochs of the extractor")
    parser.add_argument("--decoder-epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("fedpg_privacy.png"), help="file to write")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    with one_thread():
        site, attacker, clients = sides(given)
        flat = class_means(attacker.images.flatten(1), attacker.y, int(attacker.y.max()) + 1)["mean"]
        print(
            f"{'mean of':12}{'decoded':^16}{'class mean':^16}\n{'':12}" + f"{'PSNR':>8}{'SSIM':>8}" * 2 + "  own closer"
        )
        groups = grouped(clients, max(MEANS), 400, seeded(given.seed))
        mean_image = flat[groups.y].view(-1, *clients.images.shape[1:])
        rows = [("an image", clients.images[groups.members[:, 0]])]
        for k in MEANS:
            members, others = groups.members[:, :k], groups.others[:, :k]
            decoder = trained_decoder(site, attacker, k, len(attacker.y), given.decoder_epochs)
            rebuilt = decoder(clients.z[members].mean(1))
            values = [v.mean().item() for image in (rebuilt, mean_image) for v in against(image, clients, members)]
            to_members, to_others = (against(rebuilt, clients, who)[0] for who in (members, others))
            share = (to_members > to_others).float().mean() + (to_members == to_others).float().mean() / 2
            print(f"{k:2} features " + "{:8.2f}{:8.3f}{:8.2f}{:8.3f}".format(*values) + f"{100 * share:10.0f} %")
            rows.append((f"from {k} feature{'s' * (k > 1)}", rebuilt))
        rows.append(("class mean", mean_image))
    for panels, (label, images) in zip(figure.subplots(len(rows), SHOWN), rows, strict=True):
        for panel, image in zip(panels, images, strict=False):
            panel.imshow(image.permute(1, 2, 0).squeeze(), cmap="gray", vmin=0, vmax=1)
            panel.set(xticks=[], yticks=[])
        panels[0].set_ylabel(label, fontsize=8, rotation=0, ha="right", va="center")
    figure.savefig(given.out, dpi=110)
    print(f"figure: {given.out}")


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        raise SystemExit(f"error: {error}") from None
