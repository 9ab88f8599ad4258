"""Your own net: any classifier that is a torch.nn.Module. Its last linear layer is found, or named with head=."""

from torch import nn

import fedskew


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.fc = nn.Linear(8 * 3 * 3, 10)

    def forward(self, x):
        return self.fc(self.features(x))


experiment = fedskew.Experiment(method=fedskew.FedRep(), data="digits", model=Small(), rounds=3)
*_, last = fedskew.run(experiment)
print(f"personal models on their clients' own test parts: {100 * last.metrics.clients.personal.mean:.1f} %")
