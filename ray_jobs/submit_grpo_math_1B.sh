#!/usr/bin/env bash
# Submit examples/configs/grpo_math_1B.yaml; its head lists what it needs.
#
#   ray_jobs/submit_grpo_math_1B.sh [KEY=VALUE ...]
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/submit.sh" grpo examples/configs/grpo_math_1B.yaml "$@"
