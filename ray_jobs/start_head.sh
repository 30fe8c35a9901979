#!/usr/bin/env bash
# Start the head of a Ray cluster on this machine, closed to anyone without its token.
#
#   ray_jobs/start_head.sh [OPTIONS OF `ray start` ...]        e.g. --num-cpus 16 --port 6379
#
# The dashboard and its job API listen on 127.0.0.1 only. The ports between nodes listen on the network, so every
# request there must carry the token, which is made once, in ~/.ray/auth_token, and never printed. If the start fails,
# the processes it started are stopped; other Ray clusters are left alone. ray_jobs/stop_head.sh stops this head.
#
# Its files are in a directory of its own, which only this user reads, under RAY_TMPDIR (/tmp). Ray gives a job the
# address in a file of that directory: in /tmp/ray, the default, it is that of the head that was started last.
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
    --help) exec ray start --help ;;
    --temp-dir | --temp-dir=*)
      echo "error: a head has a directory of its own under RAY_TMPDIR; set that in place of --temp-dir" >&2
      exit 2
      ;;
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
# With port 0, as in a Ray that a run starts, Ray chooses a free one.
if [ "$port" != 0 ] && pid=$(pgrep -o -f "gcs_server.*--gcs_server_port=$port( |\$)"); then
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

[ -f ~/.ray/auth_token ] || (umask 077 && ray get-auth-token --generate >/dev/null)
[ ! -f ~/.ray/auth_token ] || chmod 600 ~/.ray/auth_token

# Short, because the path of a socket has at most 107 bytes. Ray makes its own directory readable and writable by all
# users, so it gets one inside.
directory=$(mktemp -d "${RAY_TMPDIR:-/tmp}/ray_head_XXXXXX")
temp=$directory/ray log=$directory/start.log session_file=$directory/session

# The agent that starts jobs gets a free port: on its fixed default port it cannot start beside another Ray, and then
# every submission is refused with "No available agent".
# In a session (setsid) of its own, so that exactly its processes can be found again.
cd "$root"
if ! NEMO_LIKE_HEAD=$port setsid --wait bash -c 'echo $$ >"$0"; exec ray start "$@"' "$session_file" \
  --head --dashboard-host 127.0.0.1 --dashboard-agent-listen-port 0 --disable-usage-stats --temp-dir "$temp" "$@" \
  >"$log" 2>&1; then
  pkill -KILL -s "$(cat "$session_file")" || true
  cat "$log" >&2
  echo "error: the head did not start; the processes it had started were stopped, other Ray clusters were not" \
    "touched. The reason is above, and in the logs under $directory" >&2
  exit 1
fi

# The addresses that Ray chose: a port may have been 0, and a machine can have several addresses.
address=$(cat "$temp/ray_current_cluster")
api=$(sed -n "s/.*RAY_API_SERVER_ADDRESS='\([^']*\)'.*/\1/p" "$log")
api=${api:-http://127.0.0.1:$dashboard_port}
cat <<END
A Ray head runs at $address, its dashboard and job API at $api.

To run something:
  RAY_API_SERVER_ADDRESS=$api $root/ray_jobs/submit.sh grpo examples/configs/grpo_gsm8k_smollm2.yaml
To see its nodes and what they have free:
  RAY_AUTH_MODE=token $(command -v ray) status --address $address
To add a machine, with the same files at $root and the same ~/.ray/auth_token (mode 600):
  mkdir -p -m 700 $directory && cd $root && \\
    RAY_AUTH_MODE=token $(command -v ray) start --disable-usage-stats --address $address
To stop this head, and no other Ray of this user:
  $root/ray_jobs/stop_head.sh $port
Logs of each node: $temp/session_latest/logs
END
