"""Learning curves of runs, finished or not, as CSV: one line an evaluated round.

python scripts/curves.py runs/compare/* > curves.csv
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

from fedskew.compare import FIGURES, figure


def main() -> None:
    writer = csv.writer(sys.stdout)
    writer.writerow(["run", "round", *FIGURES])
    for path in map(Path, sys.argv[1:]):
        for line in (path / "records.jsonl").read_text().splitlines():
            record = json.loads(line)
            if record["metrics"] is not None:
                values = [figure(record, place) for place in FIGURES.values()]
                writer.writerow([path.name, record["round"] + 1, *("" if v is None else f"{v:.4f}" for v in values)])


if __name__ == "__main__":
    main()
