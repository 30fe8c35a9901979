"""`python -m nemo_like` is the same as `nemo-like`."""

import sys

from nemo_like.cli import main

sys.exit(main())
