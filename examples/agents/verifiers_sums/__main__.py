"""Write rows of the taskset: `python -m verifiers_sums <number> <seed> > rows.jsonl`."""

from __future__ import annotations

import json
import sys

from verifiers_sums import Sums, SumsConfig

for task in Sums(SumsConfig(num_tasks=int(sys.argv[1]), seed=int(sys.argv[2]))):
    data = task.data.model_dump(mode="json")
    print(json.dumps({"prompt": task.data.prompt, "task": data}))
