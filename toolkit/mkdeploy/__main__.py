"""`python -m mkdeploy`: the same as the program `mkdeploy`."""

import sys

from mkdeploy.cli import main

sys.exit(main())
