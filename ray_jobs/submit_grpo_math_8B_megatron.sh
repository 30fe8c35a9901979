#!/usr/bin/env bash
# Submit examples/configs/grpo_math_8B_megatron.yaml; its head lists what it needs.
#
#   ray_jobs/submit_grpo_math_8B_megatron.sh [KEY=VALUE ...]
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/submit.sh" grpo examples/configs/grpo_math_8B_megatron.yaml "$@"
