#!/usr/bin/env bash
# SFT on a mixture of the demo's data on a Ray cluster; builds the tiny model and its data in runs/demo if they are not there.
#
#   ray_jobs/submit_demo_sft_mixture.sh [KEY=VALUE ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -f runs/demo/text_train.jsonl ]; then
  .venv/bin/python -m nemo_like.demo --prepare-only
fi
exec ray_jobs/submit.sh sft examples/configs/demo_sft_mixture.yaml "$@"
