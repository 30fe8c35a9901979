#!/usr/bin/env bash
# The SFT half of `make demo` on a Ray cluster; builds the tiny model and its data in runs/demo if they are not there.
#
#   ray_jobs/submit_demo_sft.sh [KEY=VALUE ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -d runs/demo ]; then
  .venv/bin/python -m nemo_like.demo --prepare-only
fi
exec ray_jobs/submit.sh sft examples/configs/demo_sft.yaml "$@"
