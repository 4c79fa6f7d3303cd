"""``python -m fedjax_async.cli``."""

import sys

from fedjax_async.cli import main

if __name__ == "__main__":
    sys.exit(main())
