"""The transfers `local`, `shm`, `p2p` and `disk` keep what the suite asks, those of changes alone too."""

from typing import ClassVar

from powertrain.testing import TransferSuite


class TestLocal(TransferSuite):
    transfer = "local"


class TestShm(TransferSuite):
    transfer = "shm"


class TestDisk(TransferSuite):
    transfer = "disk"


class TestP2p(TransferSuite):
    transfer = "p2p"


class TestDiskOfChanges(TransferSuite):
    transfer = "disk"
    options: ClassVar = {"delta": "host"}


class TestP2pOfChanges(TransferSuite):
    transfer = "p2p"
    options: ClassVar = {"delta": "host"}
