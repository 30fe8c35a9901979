#!/usr/bin/env bash
# Off-policy distillation of the demo's SFT model on a Ray cluster. The SFT half is submitted first if it never ran.
#
#   ray_jobs/submit_demo_distill.sh [KEY=VALUE ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -d runs/demo_sft/hf ]; then
  ray_jobs/submit_demo_sft.sh
fi
exec ray_jobs/submit.sh distill examples/configs/demo_distill.yaml "$@"
