"""One experiment: FedProx on ten clients whose classes are skewed."""

import fedskew

experiment = fedskew.Experiment(
    method=fedskew.FedProx(mu=0.1),
    data="digits",
    split="dirichlet:alpha=0.3,clients=10",
    rounds=5,
    training=fedskew.Training(lr=0.1, batch_size=32),
)
run = fedskew.run(experiment)
for record in run:
    print(f"round {record.number}: test accuracy {100 * record.metrics.global_.accuracy:.1f} %")

clients = run.result.metrics.clients.global_
print(
    f"over the clients' own test parts: mean {100 * clients.mean:.1f} %, worst tenth {100 * clients.worst_decile:.1f} %"
)
