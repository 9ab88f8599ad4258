"""The same run between a server and three sites on this machine, over TLS. Needs `pip install 'fedskew[flower]'`."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

import fedskew

FEDSKEW = [sys.executable, "-m", "fedskew"]

digits = fedskew.load_data("digits")
for i, name in enumerate(("hospital-a", "hospital-b", "hospital-c")):
    part = slice(i, None, 3)
    np.savez(f"{name}.npz", x_train=digits.x_train[part], y_train=digits.y_train[part])

with socket.create_server(("127.0.0.1", 0)) as listener:
    port = str(listener.getsockname()[1])
subprocess.run([*FEDSKEW, "certs", "--sites", "hospital-a,hospital-b,hospital-c"], check=True)
serve = [*FEDSKEW, "serve", "--certs", "certs/server", "--port", port, "--data", "sites", "--rounds", "2"]
server = subprocess.Popen([*serve, "--out", "runs/hospitals"])
sites = [
    subprocess.Popen(
        [*FEDSKEW, "join", "--server", f"127.0.0.1:{port}", "--certs", f"certs/{name}", "--data", f"{name}.npz"]
    )
    for name in ("hospital-a", "hospital-b", "hospital-c")
]
codes = [process.wait(timeout=300) for process in (server, *sites)]
result = json.loads(Path("runs/hospitals/result.json").read_text())
print("exit codes", codes, "digest", result["digest"][:16])
sys.exit(max(codes))
