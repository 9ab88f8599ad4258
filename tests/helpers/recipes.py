"""A small recipe that several tests run: two rows, four columns, seconds."""

SMALL = """
title = "A small table, in %"
source = "ourselves"
tolerance = 5.0
seeds = [0, 1]
proposed = "FedProx"
[columns]
FedAvg = "fedavg"
FedProx = "fedprox:mu=0.1"
Own = { method = "finetune", figure = "personal" }
Same = { method = "finetune", figure = "global" }
[settings]
rounds = 2
model = "mlp:hidden=16"
training.lr = 0.2
[rows.skewed]
split = "dirichlet:alpha=0.5,clients=4"
paper = [60.0, 70.0, nan, 60]
[rows.mean]
mean_over = [{ split = "iid:clients=4" }, { split = "pcdd:clients=5,classes=2" }]
options."*" = { mu = 0.2 }
options.Own = { epochs = 2 }
paper = [60.0, 70.0, 90.0, 60.0]
[reduced]
what = "fewer samples, one seed."
minutes = 1
rows = ["skewed"]
seeds = [0]
cut = "sample:keep=600"
options.FedProx = { mu = 0.3 }
[reduced.settings]
rounds = 1
"""
