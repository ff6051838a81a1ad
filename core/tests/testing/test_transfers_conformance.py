"""The transfers `local`, `shm` and `disk` keep what the suite asks of a transfer."""

from powertrain.testing import TransferSuite


class TestLocal(TransferSuite):
    transfer = "local"


class TestShm(TransferSuite):
    transfer = "shm"


class TestDisk(TransferSuite):
    transfer = "disk"
