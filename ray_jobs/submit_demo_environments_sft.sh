#!/usr/bin/env bash
# Teaches a tiny model the turns of two environments on a Ray cluster; builds the model and its data in
# runs/demo_environments if they are not there.
#
#   ray_jobs/submit_demo_environments_sft.sh [KEY=VALUE ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -d runs/demo_environments ]; then
  .venv/bin/python -m nemo_like.demo.environments
fi
exec ray_jobs/submit.sh sft examples/configs/demo_environments_sft.yaml "$@"
