#!/usr/bin/env bash
# RLOO on the demo's task on a Ray cluster. The SFT half of the demo is submitted first if it never ran.
#
#   ray_jobs/submit_demo_rloo.sh [KEY=VALUE ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -d runs/demo_sft/hf ]; then
  ray_jobs/submit_demo_sft.sh
fi
exec ray_jobs/submit.sh grpo examples/configs/demo_rloo.yaml "$@"
