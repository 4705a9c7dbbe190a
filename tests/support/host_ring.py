"""Stands in for an accelerator's memory in the transport `cuda_ipc`: the ring lies in the host's, its handle is a file
descriptor. The rest is the transport's own."""

import socket

import torch

from april.weights.cuda_ipc import SLOT_BYTES, SLOTS, CudaIpcTransport


class HostRingTransport(CudaIpcTransport):
    device = "cpu"

    def check(self):
        pass

    def give_handle(self, peer, ring):
        descriptor, _ = ring.untyped_storage()._share_fd_cpu_()
        socket.send_fds(peer, [b"."], [descriptor])

    def open_handle(self, content, descriptors):
        return torch.UntypedStorage._new_shared_fd_cpu(descriptors[0], SLOTS * SLOT_BYTES)
