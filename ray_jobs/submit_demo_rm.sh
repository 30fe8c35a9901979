#!/usr/bin/env bash
# A reward model from synthetic preferences on a Ray cluster; builds the model and its data in runs/demo_reward_model if
# they are not there.
#
#   ray_jobs/submit_demo_rm.sh [KEY=VALUE ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -d runs/demo_reward_model ]; then
  .venv/bin/python -m nemo_like.demo.reward_model
fi
exec ray_jobs/submit.sh rm examples/configs/demo_rm.yaml "$@"
