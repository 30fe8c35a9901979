"""A program: one Ray node that joins the cluster of argv[1] and runs until its standard input
ends.
"""

import sys

import ray._private.node
import ray._private.parameter


def main() -> None:
    parameters = ray._private.parameter.RayParams(
        gcs_address=sys.argv[1],
        redis_address=sys.argv[1],
        num_cpus=2,
        num_gpus=0,
        object_store_memory=100 * 2**20,
        min_worker_port=0,
        max_worker_port=0,
        node_manager_port=0,
        include_log_monitor=False,  # type: ignore[arg-type]
    )
    parameters.dashboard_agent_listen_port = None
    node = ray._private.node.Node(parameters, head=False, shutdown_at_exit=False, spawn_reaper=True)
    print("joined", flush=True)
    sys.stdin.read()
    node.kill_all_processes(check_alive=False, allow_graceful=True)


if __name__ == "__main__":
    main()
