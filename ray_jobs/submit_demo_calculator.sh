#!/usr/bin/env bash
# GRPO over conversations with a calculator on a Ray cluster. Its SFT run is submitted first if it never ran.
#
#   ray_jobs/submit_demo_calculator.sh [KEY=VALUE ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -d runs/demo_environments_sft/hf ]; then
  ray_jobs/submit_demo_environments_sft.sh
fi
exec ray_jobs/submit.sh grpo examples/configs/demo_calculator.yaml "$@"
