#!/usr/bin/env bash
# The GRPO half of the demo with QLoRA on a Ray cluster. The SFT half is submitted first if it never ran.
#
#   ray_jobs/submit_demo_qlora_grpo.sh [KEY=VALUE ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -d runs/demo_sft/hf ]; then
  ray_jobs/submit_demo_sft.sh
fi
exec ray_jobs/submit.sh grpo examples/configs/demo_qlora_grpo.yaml "$@"
