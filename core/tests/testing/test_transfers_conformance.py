"""The transfers `local` and `shm` keep what the suite asks of a transfer."""

from powertrain.testing import TransferSuite


class TestLocal(TransferSuite):
    transfer = "local"


class TestShm(TransferSuite):
    transfer = "shm"
