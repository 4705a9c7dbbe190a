"""`python -m april.cli` is `april`."""

import sys

from april.cli import main

sys.exit(main())
