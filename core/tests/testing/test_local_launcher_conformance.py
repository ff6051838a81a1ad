"""The launcher `local` keeps what the suite asks of a launcher."""

from powertrain.testing import LauncherSuite


class TestLocalLauncher(LauncherSuite):
    launcher = "local"
