#!/usr/bin/env bash
# The GRPO half of `make demo` on a Ray cluster. It starts from the SFT half, which is submitted first if it never ran.
#
#   ray_jobs/submit_demo_grpo.sh [KEY=VALUE ...]               e.g. policy.sequence_packing.algorithm=first_fit_shuffle
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -d runs/demo_sft/hf ]; then
  ray_jobs/submit_demo_sft.sh
fi
exec ray_jobs/submit.sh grpo examples/configs/demo_grpo.yaml "$@"
