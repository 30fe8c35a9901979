#!/usr/bin/env bash
# Submit a run to a Ray cluster and follow its log; exits with 0 if the run succeeded, with 1 if not.
#
#   ray_jobs/submit.sh [--upload] [--retries NUMBER] [--package DIR ...] [--env NAME ...] sft|grpo|dpo|distill|rm CONFIG [KEY=VALUE ...]
#
# The job API is that of RAY_API_SERVER_ADDRESS, by default http://127.0.0.1:8265: the dashboard of a head on this machine
# or the near end of an ssh tunnel to one. The token is that of ~/.ray/auth_token, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH.
#
# Without --upload the nodes see this directory under the same path (one machine, or a shared file system): nothing is
# copied, and relative paths mean what they mean here. With --upload this directory is sent along, less what .gitignore
# names; the nodes have the dependencies, and model, data and output_dir are absolute paths there. See README.md.
#
# --package DIR sends a Python package from anywhere, for example one with reward functions. The run gets PYTHONPATH,
# NEMO_LIKE_DATA, HF_*, WANDB_* and each --env NAME of this environment; values are not printed.
#
# A driver that a signal kills starts again with resume=true, up to --retries times (3).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
usage="usage: ray_jobs/submit.sh [--upload] [--retries NUMBER] [--package DIR ...] [--env NAME ...] sft|grpo|dpo|distill|rm CONFIG [KEY=VALUE ...]"
fail() {
  echo "$1" >&2
  exit 2
}

upload=false retries=3 packages=() names=()
while [ $# -gt 0 ]; do
  case $1 in
    --upload) upload=true; shift ;;
    --retries)
      [[ ${2-} =~ ^[0-9]{1,4}$ ]] || fail "--retries takes a number"
      retries=$2
      shift 2
      ;;
    --package)
      [ $# -ge 2 ] || fail "$usage"
      [ -d "$2" ] || fail "--package $2 is not a directory"
      packages+=("$(cd "$2" && pwd)")
      shift 2
      ;;
    --env)
      [ $# -ge 2 ] || fail "$usage"
      [[ $2 =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || fail "--env takes the name of a variable, without its value"
      [ -n "${!2+set}" ] || fail "--env $2: the variable is not set here"
      names+=("$2")
      shift 2
      ;;
    *) break ;;
  esac
done
[ $# -ge 2 ] || fail "$usage"
command=$1 config=$2
shift 2
case $command in
  sft | grpo | dpo | distill | rm) ;;
  *) fail "unknown command '$command'; $usage" ;;
esac
from=$PWD
cd "$root"
[ -f "$config" ] || fail "no config file $config in $root"

PATH=$root/.venv/bin:$PATH
# The same interpreter on every node: that of this directory, or the one in use.
python=$(command -v python)
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
# In a file that only this user reads: a command line is visible to all, and Ray prints that of a job.
runtime_env=$(mktemp --suffix .json)
trap 'rm -f "$runtime_env"' EXIT
address=${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}
python ray_jobs/prepare_submission.py "$address" "$from" "$runtime_env" "${#packages[@]}" "${packages[@]}" "${names[@]}"
submit=(ray job submit --address "$address" --runtime-env "$runtime_env")
if $upload; then
  "${submit[@]}" --working-dir . -- bash ray_jobs/retry.sh "$retries" python -m nemo_like "$command" --config "$config" "$@"
else
  "${submit[@]}" -- env --chdir="$root" ray_jobs/retry.sh "$retries" "$python" -m nemo_like "$command" --config "$config" "$@"
fi
