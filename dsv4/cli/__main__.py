"""`python -m dsv4.cli` is `dsv4`."""

import sys

from dsv4.cli import main

sys.exit(main())
