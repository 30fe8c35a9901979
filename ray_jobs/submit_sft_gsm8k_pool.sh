#!/usr/bin/env bash
# Submit examples/configs/sft_gsm8k_pool.yaml; its head lists what it needs.
#
#   ray_jobs/submit_sft_gsm8k_pool.sh [KEY=VALUE ...]
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/submit.sh" sft examples/configs/sft_gsm8k_pool.yaml "$@"
