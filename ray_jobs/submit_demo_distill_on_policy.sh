#!/usr/bin/env bash
# On-policy distillation of the demo's student on a Ray cluster. The off-policy run is submitted first if it never ran.
#
#   ray_jobs/submit_demo_distill_on_policy.sh [KEY=VALUE ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -d runs/demo_distill/hf ]; then
  ray_jobs/submit_demo_distill.sh
fi
exec ray_jobs/submit.sh distill examples/configs/demo_distill_on_policy.yaml "$@"
