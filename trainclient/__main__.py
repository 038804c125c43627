"""`python -m trainclient`."""

import sys

from trainclient.cli import main

sys.exit(main())
