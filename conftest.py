"""What every test of the repository starts from."""

import signal

# A shell that starts this in the background makes it ignore Ctrl-C; every process that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
