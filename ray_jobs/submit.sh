#!/usr/bin/env bash
# Submit a run to a Ray cluster and follow its log; exits with 0 if the run succeeded, with 1 if not.
#
#   ray_jobs/submit.sh [--upload] sft|grpo CONFIG [KEY=VALUE ...]
#
# The job API is that of RAY_API_SERVER_ADDRESS, by default http://127.0.0.1:8265: the dashboard of a head on this machine
# or the near end of an ssh tunnel to one. The token is that of ~/.ray/auth_token, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH.
#
# Without --upload the nodes see this directory under the same path (one machine, or a shared file system): nothing is
# copied, and relative paths mean what they mean here. With --upload this directory is sent along, less what .gitignore
# names; the nodes have the dependencies, and model, data and output_dir are absolute paths there. See README.md.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
usage="usage: ray_jobs/submit.sh [--upload] sft|grpo CONFIG [KEY=VALUE ...]"

upload=false
if [ "${1-}" = --upload ]; then
  upload=true
  shift
fi
if [ $# -lt 2 ]; then
  echo "$usage" >&2
  exit 2
fi
command=$1 config=$2
shift 2
case $command in
  sft | grpo) ;;
  *) echo "unknown command '$command'; $usage" >&2; exit 2 ;;
esac
cd "$root"
if [ ! -f "$config" ]; then
  echo "no config file $config in $root" >&2
  exit 2
fi

PATH=$root/.venv/bin:$PATH
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
submit=(ray job submit --address "${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}")
if $upload; then
  exec "${submit[@]}" --working-dir . -- python -m nemo_like "$command" --config "$config" "$@"
fi
exec "${submit[@]}" -- env --chdir="$root" ${NEMO_LIKE_DATA:+"NEMO_LIKE_DATA=$NEMO_LIKE_DATA"} \
  .venv/bin/python -m nemo_like "$command" --config "$config" "$@"
