"""The command: see __init__.py."""

import pathlib
import sys

# The folder of the package, however this was started.
sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from peers.compare import main  # noqa: E402

sys.exit(main())
