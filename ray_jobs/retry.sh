#!/usr/bin/env bash
# Run a command, and again with resume=true after a signal killed it (memory, a crash), at most NUMBER times.
#
#   ray_jobs/retry.sh NUMBER COMMAND [ARGUMENT ...]
#
# Used by submit.sh and slurm.sbatch. The exit code is the last run's. SIGTERM is passed on and ends the retries.
# Exit codes of the run itself (docs/clusters.md#exit-codes) are final.
set -u
retries=$1
shift
stopped=false
trap 'stopped=true interrupted=true; kill -TERM $run 2>/dev/null' TERM
run_once() {
  "$@" &
  run=$!
  # A signal ends `wait` before the run has ended.
  while interrupted=false; wait $run; code=$?; $interrupted; do :; done
}

run_once "$@"
for number in $(seq "$retries"); do
  # 128 + the signal; 130 is Ctrl-C and 143 SIGTERM.
  if $stopped || [ $code -le 130 ] || [ $code -eq 143 ]; then break; fi
  echo "the driver was killed by signal $((code - 128)); it starts again with resume=true" \
    "(retry $number of at most $retries)" >&2
  run_once "$@" resume=true
done
exit $code
