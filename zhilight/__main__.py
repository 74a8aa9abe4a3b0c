"""`python -m zhilight`: the same as `zhilight`."""

from __future__ import annotations

import sys

from zhilight.cli import main

sys.exit(main())
