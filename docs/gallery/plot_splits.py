"""
Who has what
============

A split is one partitioner, with any cuts before it and features after it, joined by ``+``. Each block below shows one
on scikit-learn's digits: 1,437 training images of ten classes. Left: a dot per client and class, its area is the number
of samples. Right: the sizes of the clients, stacked by class. Below: how skewed it is, in the figures that papers use.

``fedskew split dirichlet:alpha=0.1,clients=10 --png split.png`` draws the same picture for data of yours.
"""

# sphinx_gallery_start_ignore
import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import torch

import fedskew
from fedskew.data.split.plot import plot_partition
from fedskew.data.split.skew import skew
from fedskew.experiment.assemble import assemble

digits = fedskew.load_data("digits")


def show(split: str, data: fedskew.DataSet = digits) -> None:
    partition = fedskew.make_partition(split, data.y_train, seed=1, owners=data.owners_train)
    plot_partition(partition, data.y_train, data.classes, "split.png")
    for name, value in skew(partition, data.y_train, data.classes).summary().items():
        print(f"{name:18} {value:.2f}")


def look(split: str) -> None:
    """One sample of the same class at each client, as its net gets it."""
    world = assemble(fedskew.Experiment(split=split)).world
    figure, axes = plt.subplots(1, 6, figsize=(9, 1.9))
    for client, one in enumerate(axes):
        x, y = world.pool(world.train[client], client).take(torch.arange(len(world.train[client])))
        one.imshow(x[(y == 3).nonzero()[0, 0]].squeeze(), cmap="gray")
        one.set_title(f"client {client}", fontsize=9)
        one.axis("off")
    figure.savefig("look.png", dpi=100)
    plt.close(figure)


# sphinx_gallery_end_ignore
heart = fedskew.load_data("heart")


# %%
# iid
# ---
# No skew: the control that every other split is compared with.
show("iid:clients=10")

# %%
# dirichlet
# ---------
# The usual label skew. Each class is divided among the clients by Dirichlet(alpha): the smaller alpha, the fewer
# classes a client has. At 0.1 most clients have two or three.
show("dirichlet:alpha=0.1,clients=10,min=5")

# %%
# At 1 every client has nearly every class.
show("dirichlet:alpha=1,clients=10,min=5")

# %%
# dirichlet-mix
# -------------
# Each client draws a class mix of its own; sizes are equal, or lognormal with ``sigma``.
show("dirichlet-mix:alpha=0.3,clients=10")

# %%
# grouped-equal
# -------------
# Dirichlet inside groups of ten clients, then clients of one size.
show("grouped-equal:alpha=0.3,clients=10")

# %%
# quantity
# --------
# Even classes, uneven amounts: sizes by Dirichlet(alpha).
show("quantity:alpha=0.5,clients=10,min=5")

# %%
# lognormal
# ---------
# Even classes, lognormal sizes.
show("lognormal:sigma=1,clients=10")

# %%
# pcdd
# ----
# Missing classes: partially class-disjoint data as in FedMR, here two classes per client.
show("pcdd:clients=10,classes=2")

# %%
# label-k
# -------
# Client i has label i and k - 1 random others.
show("label-k:clients=10,k=3")

# %%
# shards
# ------
# FedAvg's own: the pool sorted by label, cut into shards, two for each client.
show("shards:clients=10,per_client=2")

# %%
# two-class
# ---------
# Every class in two halves, every client two halves of different classes.
show("two-class")

# %%
# subset
# ------
# Every client has every class, but nearly only one of them.
show("subset:clients=10,share=0.95")

# %%
# natural
# -------
# A client is whoever made the samples: four hospitals, of which one has nearly only sick patients.
show("natural", heart)

# %%
# longtail
# --------
# Classes thinned exponentially before they are split: the last has a tenth of the samples of the first.
show("longtail:factor=10+dirichlet:alpha=0.5,clients=10,min=2")

# %%
# public
# ------
# A balanced set that the server keeps and no client has, for methods that distil on it. The rest is split.
show("public:per_class=10+dirichlet:alpha=0.3,clients=10,min=5")

# %%
# sample
# ------
# A random part of the pool, for few samples.
show("sample:keep=300+dirichlet:alpha=0.3,clients=10,min=2")

# %%
# noise
# -----
# From here on clients have different inputs, not different classes. The last client has the most noise.
look("iid:clients=6+noise:level=2")

# %%
# rotate
# ------
# Each client turns its images.
look("iid:clients=6+rotate:turns=4")

# %%
# colour
# ------
# A colour cast; grey images are darker or brighter. Normalised like the others, a client's images differ in contrast.
look("iid:clients=6+colour:level=0.9")

# %%
# resolution
# ----------
# Each client sees its images at another resolution.
look("iid:clients=6+resolution:levels=3")

# %%
# concept
# -------
# Clients disagree on what a class is called: what half of them call 3, the others call 4. These are the images with the
# label 3.
look("iid:clients=6+concept:groups=2")
