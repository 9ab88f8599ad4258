"""Learning curves of runs, finished or not, as CSV: one line an evaluated round.

python scripts/curves.py runs/compare/* > curves.csv
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

from fedskew.evaluation.figures import ACCURACIES


def main() -> None:
    rows: list[dict[str, str]] = []
    for path in map(Path, sys.argv[1:]):
        for line in (path / "records.jsonl").read_text().splitlines():
            record = json.loads(line)
            if record["metrics"] is not None:
                values = {key: figure.read(record) for key, figure in ACCURACIES.items()}
                shown = {key: f"{value:.4f}" for key, value in values.items() if value is not None}
                rows.append({"run": path.name, "round": str(record["round"] + 1), **shown})
    columns = [key for key in ("run", "round", *ACCURACIES) if any(key in row for row in rows)]
    writer = csv.DictWriter(sys.stdout, columns)
    writer.writeheader()
    writer.writerows(rows)


if __name__ == "__main__":
    main()
