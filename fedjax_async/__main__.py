"""``python -m fedjax_async``: the command line."""

import sys

from fedjax_async.cli import main

if __name__ == "__main__":
    sys.exit(main())
