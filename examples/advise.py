"""Which method for these clients? A short race among a few methods, in Python."""

import fedskew

experiment = fedskew.Experiment(data="digits", split="dirichlet:alpha=0.1,clients=6", model="mlp:hidden=32", rounds=4)
advice = fedskew.advise(
    experiment, methods=["fedrep"], limits=fedskew.Limits(public=False), budget_rounds=500, seeds=(0, 1, 2)
)
print(advice.sentence)
print(advice.best_global)
for row in advice.finals:
    print(f"{row.method:24} lr {row.lr:<6g} validation {row.validation:.3f} test {row.test:.3f}")
print("run it with fedskew.run(advice.experiment)")
