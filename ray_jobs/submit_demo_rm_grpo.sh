#!/usr/bin/env bash
# GRPO with a reward model on a Ray cluster. The run that trains the reward model is submitted first if it never ran.
#
#   ray_jobs/submit_demo_rm_grpo.sh [KEY=VALUE ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -d runs/demo_rm/hf ]; then
  ray_jobs/submit_demo_rm.sh
fi
exec ray_jobs/submit.sh grpo examples/configs/demo_rm_grpo.yaml "$@"
