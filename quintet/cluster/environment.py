"""What a rank finds around it: its environment, its threads, the address that it listens on."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

from quintet.cluster.worker import Place
from quintet.errors import UserError

LOOPBACK = "127.0.0.1"


def listen(host: str) -> socket.socket:
    """Find a port for rank 0's store on this address alone, and hold it: torch's own would listen on all addresses."""
    return socket.create_server((host, 0), backlog=4096)


def threads_per_rank(cores: int, ranks: int) -> int:
    """Return the threads of a rank that computes on a CPU: the user's OMP_NUM_THREADS (of a list for nested regions the first), or an
    equal share of its node's cores. Raises UserError for what is no number."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    first = given.partition(",")[0].strip() or str(max(1, cores // ranks))
    if not first.isdecimal() or not int(first):
        raise UserError(f"OMP_NUM_THREADS={given} is no number of threads: correct or unset it")
    return int(first)


PRODUCTS_KEPT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
"""oneDNN, and torch beside it, keep code made for 1,024 shapes of a product each. Rows of other lengths come in every step, so that only
those of the micro-batch under way are met again: the demo came to 0.4 GiB more, and was no faster."""


FP32_PRODUCTS = {"NVIDIA_TF32_OVERRIDE": "0"}
"""cuBLAS multiplies what is fp32 in fp32. TransformerEngine asks it for the 10 bits of TF32, and read when CUDA starts is this alone."""


def rank_environment(place: Place, gpus: Sequence[int], is_local: bool) -> dict[str, str]:
    """Return what a rank's environment needs beside its node's. gpus: its own; is_local: all ranks of the run are on this machine."""
    env = {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "MASTER_ADDR": place.master_host,
        "MASTER_PORT": str(place.master_port),
    }
    if place.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""  # a machine may have some, and layers ask torch alone
        env["OMP_NUM_THREADS"] = str(place.threads)
    else:  # as Ray sets it for ranks with devices of their own
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    products = PRODUCTS_KEPT if place.device == "cpu" else FP32_PRODUCTS
    env |= {key: os.environ.get(key, ours) for key, ours in products.items()}
    if is_local:
        # gloo would look the host's name up, which laptops often cannot, and which may stand for an address that others reach.
        # What the environment says for runs on a cluster does not count here.
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        env |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return env
