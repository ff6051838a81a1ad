"""The transfers `local`, `shm`, `p2p` and `disk` keep what the suite asks of a transfer."""

from powertrain.testing import TransferSuite


class TestLocal(TransferSuite):
    transfer = "local"


class TestShm(TransferSuite):
    transfer = "shm"


class TestDisk(TransferSuite):
    transfer = "disk"


class TestP2p(TransferSuite):
    transfer = "p2p"
