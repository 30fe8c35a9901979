#!/usr/bin/env bash
# Submit examples/configs/grpo_code_smollm2.yaml; its head lists what it needs.
#
#   ray_jobs/submit_grpo_code_smollm2.sh [KEY=VALUE ...]
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/submit.sh" grpo examples/configs/grpo_code_smollm2.yaml "$@"
