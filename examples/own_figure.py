"""Your own figure from results.json: python examples/own_figure.py 'outputs/runs/**/results.json' figure.png."""

import glob
import json
import math
import sys

from matplotlib import pyplot

pattern, target = sys.argv[1:] or sys.exit(__doc__)
for file in sorted(glob.glob(pattern, recursive=True)):
    with open(file) as content:
        run = json.load(content)
    rows = run["metrics"]["test"]
    pyplot.plot(
        [row["memories"] for row in rows],
        [math.exp(row["loss"]) for row in rows],
        "o-",
        label=f"{run['name']}, seed {run['seed']}",
    )
pyplot.ylabel("test perplexity")
pyplot.xticks(rotation=20, ha="right", fontsize=8)
pyplot.legend()
pyplot.tight_layout()
pyplot.savefig(target)
print(f"figure: {target}")
