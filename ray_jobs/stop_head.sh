#!/usr/bin/env bash
# Stop a head that start_head.sh started on this machine, with all its processes here, and no other Ray cluster.
#
#   ray_jobs/stop_head.sh [PORT]                               PORT is 6379 unless given
set -euo pipefail
port=${1:-6379}
if ! [[ $port =~ ^[0-9]{1,5}$ ]]; then
  echo "usage: ray_jobs/stop_head.sh [PORT]" >&2
  exit 2
fi
for pid in $(pgrep -f "gcs_server.*--gcs_server_port=$port( |\$)" || true); do
  # The mark means that start_head.sh made the session, so that it holds nothing but this head.
  if grep -zqx "NEMO_LIKE_HEAD=$port" "/proc/$pid/environ" 2>/dev/null; then
    session=$(ps -o sid= -p "$pid" | tr -d ' ')
    pkill -TERM -s "$session" || true
    for _ in $(seq 100); do
      pgrep -s "$session" >/dev/null || break
      sleep 0.1
    done
    pkill -KILL -s "$session" || true
    echo "stopped the head with port $port"
    exit 0
  fi
done
echo "error: no head with port $port that ray_jobs/start_head.sh started runs on this machine" >&2
exit 1
