#!/usr/bin/env bash
# Start the head of a Ray cluster on this machine, closed to anyone without its token.
#
#   ray_jobs/start_head.sh [OPTIONS OF `ray start` ...]        e.g. --num-cpus 16 --port 6379
#
# The dashboard and its job API listen on 127.0.0.1 only. What nodes talk to each other on listens on the network, so
# every request there must carry the token, which is made once, in ~/.ray/auth_token, and never printed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PATH=$root/.venv/bin:$PATH
export RAY_AUTH_MODE=token

(umask 077 && ray get-auth-token --generate >/dev/null)
[ ! -f ~/.ray/auth_token ] || chmod 600 ~/.ray/auth_token
ray start --head --dashboard-host 127.0.0.1 --disable-usage-stats "$@"

cat <<EOF

To add a machine, with the same files at $root and the same ~/.ray/auth_token (mode 600); PORT is 6379 unless set:
  RAY_AUTH_MODE=token $root/.venv/bin/ray start --disable-usage-stats --address HEAD:PORT
To run something:
  ray_jobs/submit.sh grpo examples/configs/grpo_gsm8k_smollm2.yaml
EOF
