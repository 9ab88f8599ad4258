"""After training: load the model of a run, predict, and take it to plain PyTorch."""

import tempfile

import torch

import fedskew

with tempfile.TemporaryDirectory() as folder:
    run = fedskew.run(fedskew.Experiment(data="digits", rounds=5), out=folder)
    list(run)
    model = fedskew.load(folder)

images = fedskew.load_data("digits").x_test[:5]  # uint8 [n, height, width, channels], as they were read
print(model.predict(images).classes)

plain = model.module()  # a torch.nn.Module from raw samples to logits, without anything of fedskew's
with torch.no_grad():
    print(plain(torch.from_numpy(images)).argmax(1).tolist())
