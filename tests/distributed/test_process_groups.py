from __future__ import annotations

import os
import socket

import pytest
import torch.distributed as dist

from nemo_like.distributed import process_groups as mesh
from nemo_like.distributed.local_group import local_context
from nemo_like.distributed.parallel_layout import Topology


def test_a_world_of_one_has_every_axis_and_is_left_again() -> None:
    context = local_context(num_threads=1)
    device = mesh.init_process_group(context)
    try:
        assert device.type == "cpu"
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
        axes = mesh.build_device_mesh(Topology(), "cpu")
        assert axes.mesh_dim_names == ("pp", "dp", "cp", "tp")
        with pytest.raises(RuntimeError, match="already belongs to a process group"):
            mesh.init_process_group(context)
    finally:
        mesh.destroy()
    assert not mesh.is_joined()
    mesh.destroy()


def test_gloo_is_bound_to_the_interface_of_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    mesh._bind_gloo("file:///tmp/rendezvous")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    mesh._bind_gloo("tcp://127.0.0.1:29500")
    loopback = os.environ["GLOO_SOCKET_IFNAME"]
    assert loopback in [name for _, name in socket.if_nameindex()]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "chosen0")
    mesh._bind_gloo("tcp://127.0.0.1:29500")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "chosen0"
