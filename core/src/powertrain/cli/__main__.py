"""`python -m powertrain.cli` is the command `powertrain`."""

import sys

from powertrain.cli.main import main

sys.exit(main())
