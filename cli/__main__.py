"""`python -m mgtp.cli` is the `mgtp` program."""

import sys

from .app import main

sys.exit(main())
