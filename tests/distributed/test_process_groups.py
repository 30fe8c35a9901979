from __future__ import annotations

import os
import socket

import pytest
import torch.distributed as dist

from nemo_like.distributed import process_groups
from nemo_like.distributed.local_group import local_context
from nemo_like.parallel_layout import ParallelLayout


def test_a_world_of_one_has_every_axis_and_is_left_again() -> None:
    context = local_context(num_threads=1)
    device = process_groups.init_process_group(context)
    try:
        assert device.type == "cpu"
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        axes = process_groups.build_device_mesh(ParallelLayout(), "cpu")
        assert axes.mesh_dim_names == ("pp", "dp", "cp", "tp")
        with pytest.raises(RuntimeError, match="already belongs to a process group"):
            process_groups.init_process_group(context)
    finally:
        process_groups.destroy()
    assert not process_groups.is_joined()
    process_groups.destroy()


def test_gloo_is_bound_to_the_interface_of_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    process_groups.bind_gloo("file:///tmp/rendezvous")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    process_groups.bind_gloo("tcp://127.0.0.1:29500")
    loopback = os.environ["GLOO_SOCKET_IFNAME"]
    assert loopback in [name for _, name in socket.if_nameindex()]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "chosen0")
    process_groups.bind_gloo("tcp://127.0.0.1:29500")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "chosen0"
