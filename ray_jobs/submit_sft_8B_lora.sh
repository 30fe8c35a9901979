#!/usr/bin/env bash
# Submit examples/configs/sft_8B_lora.yaml; its head lists what it needs.
#
#   ray_jobs/submit_sft_8B_lora.sh [KEY=VALUE ...]
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/submit.sh" sft examples/configs/sft_8B_lora.yaml "$@"
