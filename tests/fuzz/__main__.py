"""The fuzzers with a larger budget: `python -m tests.fuzz --cases 10000`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.cases import config_case, data_case, run_case
from tests.fuzz.model_files import model_case

KINDS = {"configs": config_case, "data": data_case, "models": model_case}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000, help="cases of each kind")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kind", choices=tuple(KINDS), help="default: all")
    arguments = parser.parse_args()
    num_problems = 0
    for kind, case in KINDS.items():
        if arguments.kind not in (None, kind):
            continue
        counts: Counter[str] = Counter()
        start = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            for seed in range(arguments.first, arguments.first + arguments.cases):
                problem = run_case(case(seed, Path(folder)), counts)
                if problem is not None:
                    num_problems += 1
                    print(f"{kind} seed {seed}: {problem!r}", flush=True)
        print(
            f"{kind}: {dict(counts)} in {time.process_time() - start:.0f} s of CPU time", flush=True
        )
    return 1 if num_problems else 0


if __name__ == "__main__":
    sys.exit(main())
