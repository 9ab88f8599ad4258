"""Learning curves of runs, finished or not, as CSV: one line per evaluated round.

python scripts/curves.py runs/compare/* > curves.csv
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from fedskew.core.settings import UsageError
from fedskew.evaluation.figures import ACCURACIES
from fedskew.experiment.run_directory import read_run


def main() -> None:
    rows: list[dict[str, str]] = []
    for path in map(Path, sys.argv[1:]):
        for record in read_run(path).records:
            if record.metrics is not None:
                values = {name: figure.read(record) for name, figure in ACCURACIES.items()}
                texts = {name: f"{value:.4f}" for name, value in values.items() if value is not None}
                rows.append({"run": path.name, "round": str(record.number), **texts})
    columns = [name for name in ("run", "round", *ACCURACIES) if any(name in row for row in rows)]
    writer = csv.DictWriter(sys.stdout, columns)
    writer.writeheader()
    writer.writerows(rows)


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        raise SystemExit(f"error: {error}") from None
