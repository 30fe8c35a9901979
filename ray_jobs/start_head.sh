#!/usr/bin/env bash
# Start the head of a Ray cluster on this machine, closed to anyone without its token.
#
#   ray_jobs/start_head.sh [OPTIONS OF `ray start` ...]        e.g. --num-cpus 16 --port 6379
#
# The dashboard and its job API listen on 127.0.0.1 only. The ports between nodes listen on the network, so every
# request there must carry the token, which is made once, in ~/.ray/auth_token, and never printed. If the start fails,
# the processes it started are stopped; other Ray clusters are left alone. ray_jobs/stop_head.sh stops this head.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PATH=$root/.venv/bin:$PATH
export RAY_AUTH_MODE=token

port=6379 dashboard_port=8265 previous=
for argument in "$@"; do
  case $previous in
    --port) port=$argument ;;
    --dashboard-port) dashboard_port=$argument ;;
  esac
  case $argument in
    --port=*) port=${argument#*=} ;;
    --dashboard-port=*) dashboard_port=${argument#*=} ;;
  esac
  previous=$argument
done

for number in "$port" "$dashboard_port"; do
  if ! [[ $number =~ ^[0-9]{1,5}$ ]] || [ "$number" -gt 65535 ]; then
    echo "error: '$number' is not a port" >&2
    exit 2
  fi
done
if pid=$(pgrep -o -f "gcs_server.*--gcs_server_port=$port( |\$)"); then
  echo "error: a Ray head with port $port already runs on this machine (pid $pid). Use it, stop it with" \
    "ray_jobs/stop_head.sh $port, or start a second one with --port and --dashboard-port" >&2
  exit 1
fi
for number in "$port" "$dashboard_port"; do
  if [ "$number" != 0 ] && (exec 3<>"/dev/tcp/127.0.0.1/$number") 2>/dev/null; then
    echo "error: port $number is in use by another program; choose others with --port and --dashboard-port" \
      "(defaults 6379 and 8265)" >&2
    exit 1
  fi
done

(umask 077 && ray get-auth-token --generate >/dev/null)
[ ! -f ~/.ray/auth_token ] || chmod 600 ~/.ray/auth_token

# The agent that starts jobs gets a free port: on its fixed default port it cannot start beside another Ray, and then
# every submission is refused with "No available agent".
# In a session (setsid) of its own, so that exactly its processes can be found again.
session_file=$(mktemp)
trap 'rm -f "$session_file"' EXIT
cd "$root"
if ! NEMO_LIKE_HEAD=$port setsid --wait bash -c 'echo $$ >"$0"; exec ray start "$@"' "$session_file" \
  --head --dashboard-host 127.0.0.1 --dashboard-agent-listen-port 0 --disable-usage-stats "$@"; then
  pkill -KILL -s "$(cat "$session_file")" || true
  echo "error: the head did not start; the processes it had started were stopped, other Ray clusters were not" \
    "touched. The reason is above, and in the newest session under /tmp/ray" >&2
  exit 1
fi

cat <<END

To add a machine, with the same files at $root and the same ~/.ray/auth_token (mode 600):
  cd $root && RAY_AUTH_MODE=token .venv/bin/ray start --disable-usage-stats --address HEAD:$port
To run something:
  ray_jobs/submit.sh grpo examples/configs/grpo_gsm8k_smollm2.yaml
To stop this head, and no other Ray of this user:
  ray_jobs/stop_head.sh $port
END
